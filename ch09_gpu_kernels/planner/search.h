#pragma once

#include <set>
#include <string>

#include "base/args.h"

namespace usp {

struct TrainConfig;

/// The flags of a search: with --cluster, --plan looks for the best layout of a batch.
struct SearchConfig {
  std::string cluster;     ///< a name, or a file; empty: no search
  int64_t nodes = 1;       ///< of the cluster
  int64_t plan_best = 10;  ///< layouts to print
  bool plan_json = false;  ///< as JSON
  std::string require;     ///< what the best has to reach; empty: nothing
  std::string plan_rows;   ///< a table of runs to predict; empty: none
  std::string plan_runs;   ///< traced runs, outputs of nccl-tests: to calibrate with; empty: none
  std::string plan_out;    ///< the file for what is predicted, fitted, calibrated, or drawn
  std::string plan_fit;    ///< fit the cluster's numbers to the rows that are so; empty: do not
  std::string what_if;     ///< changes of the cluster: search on both; empty: none
  std::string why;         ///< two layouts to compare part by part; empty: none
  std::set<std::string> chosen;  ///< flags whose values the command line decides
  static constexpr int64_t kMaxNodes = 1 << 16;

  /// Whether the command line decides this flag, of those that a search would choose.
  bool decides(const std::string& flag) const { return chosen.contains(flag); }

  /// Whether there is something to plan: a batch, a table of runs, or traces of some.
  bool plans(const TrainConfig& run) const;

  void bind(Args& args);
  void validate(const Args& args);
  /// Throws UsageError where there is no batch to plan for.
  void check(const TrainConfig& run) const;
};

constexpr int kNothingAsRequired = 3;  ///< the exit code where no layout is as required

/// What a search has to say, and the exit code that goes with it: 3 where nothing is as required.
struct SearchAnswer {
  std::string text;
  int exit_code = 0;
};

/// Looks for the layouts in which the cluster trains fastest, by the book's three steps: what fits,
/// how the batch is reached, what is fastest. Playbook, "Finding the Best Training Configuration".
SearchAnswer search(const TrainConfig& config);
/// Prints the plan of a batch: what search() finds where there is a cluster, else plan_batch().
/// Returns the exit code.
int print_plan(const TrainConfig& config);

}  // namespace usp
