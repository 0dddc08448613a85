#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config.h"
#include "planner/cluster.h"

namespace usp {

/// A number of a cluster that a fit may choose.
struct Knob {
  std::string name;                      ///< as the cluster's file has it
  double minimum, maximum;               ///< of it
  double start;                          ///< where a fit begins, whatever the file says
  std::function<Sourced&(Cluster&)> of;  ///< where a cluster has it
};

/// The parts of a flag's list, which commas separate.
std::vector<std::string> split_list(const std::string& text);
/// The same of files and directories. Throws UsageError where one is there twice: it would be left
/// out of a fit and fitted at once.
std::vector<std::string> split_files(const char* flag, const std::string& text);

/// By how much a prediction is off: up to `scale`, in parts, its square counts, beyond its amount.
double soft(double predicted, double measured, double scale = 0.05);

/// The knobs that steps depend on; `gathers`: some runs have ZeRO, whose gathers an all-reduce can
/// be compared with.
std::vector<Knob> step_knobs(bool gathers);
/// The knobs that memory depends on.
std::vector<Knob> memory_knobs();

/// The cluster from which a fit sets out: each knob where it starts.
Cluster begin_at(Cluster cluster, const std::vector<Knob>& knobs);

/// Chooses the knobs so that error(cluster) is least, by trying a factor up and down for each and
/// going on where that helps (Hooke and Jeeves).
Cluster fit(Cluster cluster, const std::vector<Knob>& knobs,
            const std::function<double(const Cluster&)>& error);

/// Fits the cluster's numbers to the tables of `plan_rows`, and says how far off they are on the
/// rows that were fitted, and on fifths of them that were left out of a fit in turn.
std::string fit_rows(const TrainConfig& config);

}  // namespace usp
