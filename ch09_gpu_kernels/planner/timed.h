#pragma once

#include "planner/candidates.h"
#include "planner/replay.h"

namespace usp {

/// A layout, laid out in time.
struct Timed {
  Candidate candidate;
  Replayed replayed;
  RankClasses classes;
  std::map<Origin, int> origins;  ///< of the cluster's numbers that it rests on

  double gib() const;                ///< the peak of the fullest rank
  int fullest() const;               ///< the first rank with that peak
  double tokens_per_second() const;  ///< of all ranks together
  /// Of the cluster's peak, what the book's count of the model's operations makes.
  double mfu(const Cluster& cluster) const;
};

/// The step of a run on a cluster. Of many micro-batches it records two numbers of them that differ
/// by one for each stage, and goes on as from the first to the second: with `all`, it records all.
Timed time_step(const Candidate& candidate, const Cluster& cluster, bool all = false);

}  // namespace usp
