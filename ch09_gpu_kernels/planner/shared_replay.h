#pragma once

#include "planner/classes_of_ranks.h"
#include "planner/cost.h"

namespace usp {

/// What a rank's kernels and exchanges take from each other, which replay() leaves out.
struct Sharing {
  bool links = true;  ///< exchanges of a rank that are under way over one kind of link divide it
  double beside = 1;  ///< the share of its speed that a kernel has beside an exchange of its rank
};

// [shared]
/// Seconds of the step that replay() lays out, where ranks share like this: the speed of whatever
/// is under way changes whenever something begins or ends. So no sum of fixed seconds says when.
/// Throws Error where the ranks wait for each other for ever.
double shared_step(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost,
                   const Sharing& sharing);
// [shared]

}  // namespace usp
