#pragma once

#include <string>
#include <vector>

#include "planner/timed.h"

namespace usp {

/// What --require asks for.
struct Requirement {
  std::string what;  ///< mfu, mem, step or tokens_per_s
  bool at_least;
  double value;

  /// Whether a step on this cluster is so.
  bool holds(const Timed& timed, const Cluster& cluster) const;
};

/// Requirements that commas separate. Throws UsageError with the part that is none.
std::vector<Requirement> parse_requirements(const std::string& text);

/// A search for the layouts in which a cluster trains a batch fastest.
class LayoutSearch {
 public:
  static constexpr double kMargin =
      1.25;  ///< of the formulas' best: what is beyond, and beyond the fastest, is not replayed
  static constexpr size_t kAtLeast = 24;  ///< layouts are replayed, if they fit
  static constexpr size_t kAtMost = 96;
  static constexpr int kDoublings = 6;  ///< of the nodes, in search of enough of them

  /// Takes the nearest batch that the ranks reach. Throws UsageError for what no search is about.
  LayoutSearch(TrainConfig config, Cluster cluster);

  /// Finds them. Of a search on a cluster with the same nodes, layouts' memory is not counted
  /// again, and where they are as fast, their steps are not replayed again. Throws UsageError where
  /// nothing fits, with what is missing.
  void run(const LayoutSearch* same_memory = nullptr, const LayoutSearch* same_steps = nullptr);

  const TrainConfig& config() const { return config_; }
  const Cluster& cluster() const { return cluster_; }
  const Candidates& candidates() const { return found_; }
  /// Layouts that are as required, the fastest first.
  const std::vector<Timed>& timed() const { return timed_; }
  int64_t replayed() const { return std::ssize(all_timed_); }
  /// The dry runs, for whoever asks more about these layouts.
  SegmentRecords& records() const { return *records_; }
  int64_t ranks() const;  ///< of all nodes
  /// "h100_nvl8: 1 node of 8, 8 ranks, ..."
  std::string heading() const;
  /// The tokens that are asked for, and, where the batch is another, a line that says why.
  int64_t asked() const { return asked_; }
  const std::string& batch_note() const { return batch_note_; }

 private:
  [[noreturn]] void refuse_all() const;
  std::string what_helps() const;
  std::string given_sizes() const;
  int64_t nodes_that_divide() const;
  void time_best(const LayoutSearch* same_steps);
  const Timed* find(const TrainConfig& layout) const;

  TrainConfig config_;
  Cluster cluster_;
  int64_t asked_;
  std::string batch_note_;
  std::vector<Requirement> required_;
  Candidates found_;
  std::vector<Timed> all_timed_, timed_;
  std::shared_ptr<SegmentRecords> records_ = std::make_shared<SegmentRecords>();
};

/// The share of the step that ranks wait, by dimension.
std::map<std::string, double> exposed_by_dimension(const Timed& timed);

}  // namespace usp
