#pragma once

#include "planner/candidates.h"
#include "planner/replay.h"
#include "planner/schedule_replay.h"
#include "planner/segments.h"

namespace usp {

/// A layout, laid out in time.
struct Timed {
  Candidate candidate;
  Replayed replayed;
  RankClasses classes;
  std::map<Origin, int> origins;    ///< of the cluster's numbers that it rests on
  std::vector<CriticalPath> paths;  ///< of the steps that were replayed

  double gib() const;                ///< the peak of the fullest rank
  int fullest() const;               ///< the first rank with that peak
  double tokens_per_second() const;  ///< of all ranks together
  /// Share of the cluster's peak that the book's count of the model's operations makes.
  double mfu(const Cluster& cluster) const;
};

/// A recorded step as products of matrices: its seconds alone, and those in no time.
class FoldedStep {
 public:
  /// Step of one run, or of two: then their difference is added `times` times to the first.
  FoldedStep(std::vector<ScheduleReplay> runs, double times)
      : runs_(std::move(runs)), times_(times) {}

  /// On a cluster: as long as RecordedStep::time() lays it out.
  double seconds(const Cluster& cluster);

 private:
  std::vector<ScheduleReplay> runs_;
  double times_;
};

/// The record of a layout's step, for any cluster whose nodes have as many ranks. Of many
/// micro-batches it records two numbers of them that differ by one for each stage, and goes on as
/// from the first to the second: with `all`, it records all. What `records` has is not recorded
/// again.
class RecordedStep {
 public:
  RecordedStep(Candidate candidate, int64_t ranks_per_node, SegmentRecords& records,
               bool all = false);

  /// Lays it out in time.
  Timed time(const Cluster& cluster) const;
  /// The step where exchanges that are under way at once divide links, and ops beside them have the
  /// cluster's `beside` of their speed.
  double shared(const Cluster& cluster) const;
  /// A drawing of the fewest micro-batches that were recorded, for Perfetto.
  std::string timeline(const Cluster& cluster) const;
  /// To ask how long it is on many clusters.
  FoldedStep fold() const;
  /// Seconds that the critical path of another cluster takes on this one: the step's, where it is
  /// critical here as well.
  double along(const Timed& other, const Cluster& cluster) const;

 private:
  Candidate candidate_;
  RankClasses classes_;
  std::vector<std::vector<Program>> runs_;  ///< one, or two
  double times_ = 0;                        ///< the difference of the two, beyond the first
  bool piles_up_ = false;  ///< whether more micro-batches keep more activations at a time
};

/// A layout's step on a cluster.
Timed time_step(const Candidate& candidate, const Cluster& cluster, SegmentRecords& records,
                bool all = false);
/// The same, with records of its own.
Timed time_step(const Candidate& candidate, const Cluster& cluster, bool all = false);

}  // namespace usp
