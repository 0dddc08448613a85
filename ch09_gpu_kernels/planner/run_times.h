#pragma once

#include <string>
#include <vector>

#include "planner/record.h"

namespace usp {

/// What a traced run took, as far as a cluster's numbers show in it. The first steps are left out.
struct RunTimes {
  /// An op of one shape, by the CPU clock of the rank's main thread, or in its GPU's lane: the
  /// median over ranks and steps.
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

  bool on_device = false;  ///< GPUs computed, or exchanged what they had
  bool is_table = false;   ///< of exchanges alone, as nccl-tests prints them
  int64_t ranks_per_node = 1;
  int64_t steps = 0;  ///< that count
  std::vector<Op> ops;
  std::vector<Sent> sent;
  /// By the CPU clock, beside ops and waits: for each op or exchange. Of a GPU's host: from one
  /// op's launch to the next one's, the median.
  double between = 0;
  int64_t between_them = 0;  ///< ops and exchanges, or launches
};

constexpr int64_t kWarmUpSteps = 4;  ///< are left out: their first touch of memory is no op's time

/// The configuration that a run's run.json records.
TrainConfig config_of_run(const std::string& run_dir);

/// Reads trace.json of a run. The shapes of its ops come from a dry run of the same flags, which
/// has to do the same. Throws UsageError where it does not, as with experts, whose load follows
/// from data, and where nothing is left behind the warm-up.
RunTimes read_run_times(const std::string& run_dir);

}  // namespace usp
