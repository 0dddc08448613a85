#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "planner/cluster.h"
#include "planner/run_times.h"

namespace usp {

/// A number of a cluster that runs decide, in the unit of the cluster's file.
struct CalibratedNumber {
  std::string key;  ///< as the file has it, such as "links.node.gbs"
  double value = 0;
  /// The least and the largest, of fits that leave out one of the runs in turn.
  std::optional<std::pair<double, double>> interval;
  int64_t events = 0;  ///< timed, that it rests on
  std::string of;      ///< what they are, such as "products"
};

/// A cluster as runs have found it.
struct Calibration {
  Cluster cluster;
  std::vector<CalibratedNumber> numbers;
  std::vector<std::string> unknown;       ///< keys of numbers that no run says anything about
  double ops_off = 0, exchanges_off = 0;  ///< mean error of their times, by the time that they take
};

/// Fits the numbers of a cluster to times of its own runs: the peak of each dtype that they
/// multiply in, at which products and memory then count as fully efficient, the lengths at which
/// products reach half of it, the share that attention reaches, the memory's bandwidth, what an op
/// costs the host, and each link that something was sent over. Other links and peaks become
/// unknown, so that nothing can rest on them; where there are only tables of exchanges, what ops
/// take stays as it is.
Calibration calibrate(const Cluster& start, const std::vector<RunTimes>& runs);

/// Calibrates the cluster with what `plan_runs` names, directories of runs and outputs of
/// nccl-tests, and writes its file to `plan_out`. Returns what each number rests on, in words.
std::string calibrate_cluster(const TrainConfig& config);

}  // namespace usp
