#pragma once

#include <string>
#include <vector>

#include "planner/record.h"

namespace usp {

/// What a traced run on CPUs took, as far as a cluster's numbers show in it. The first steps are
/// left out.
struct RunTimes {
  /// An op of one shape, by the CPU clock of the rank's main thread: the median over ranks and
  /// steps.
  struct Op {
    Kernel kernel;
    double seconds = 0;
    int64_t events = 0;  ///< timed
  };
  /// An operation of one shape among the same ranks, from when the last of them had begun it until
  /// the last had ended it. The least of these times: a rank that finds no core is no slow link. A
  /// message has two ranks, its sender first.
  struct Sent {
    Exchange exchange;
    ProgramGroup group;
    double seconds = 0;
    int64_t events = 0;
  };

  int64_t ranks_per_node = 1;
  int64_t steps = 0;  ///< that count
  std::vector<Op> ops;
  std::vector<Sent> sent;
  double between = 0;        ///< by the CPU clock, beside ops and waits: for each op or exchange
  int64_t between_them = 0;  ///< ops and exchanges
};

constexpr int64_t kWarmUpSteps = 4;  ///< are left out: their first touch of memory is no op's time

/// The configuration that a run's run.json records.
TrainConfig config_of_run(const std::string& run_dir);

/// Reads trace.json of a run. The shapes of its ops come from a dry run of the same flags, which
/// has to do the same. Throws UsageError where it does not, as with experts, whose load follows
/// from data; where a device did the work; where nothing is left behind the warm-up.
RunTimes read_run_times(const std::string& run_dir);

}  // namespace usp
