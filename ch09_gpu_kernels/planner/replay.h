#pragma once

#include <map>
#include <string>
#include <vector>

#include "planner/classes_of_ranks.h"
#include "planner/cost.h"

namespace usp {

/// Where a rank's time in a step goes. Seconds.
struct RankTime {
  int rank = 0;
  double computes = 0;                    ///< its ops
  std::map<std::string, double> exposed;  ///< it waits for an exchange of this group
  double starves = 0;                     ///< the device waits for its host
  double gradients = 0;                   ///< when it had the last of them; from the step's begin
  double first_gradients = 0;             ///< the same of a first step, which follows none
  int64_t peak = 0;                       ///< bytes
};

/// A step, laid out in time.
struct Replayed {
  double step = 0;                ///< from the end of a step to that of the next, of the last rank
  double gradients = 0;           ///< until the last rank has all of its gradients
  std::vector<RankTime> classes;  ///< of each class's representative

  /// Of the step, the share of these groups' exposed time, over all ranks.
  double exposed(const RankClasses& of, const std::string& group) const;
  /// The share of the step in which ranks wait for other stages.
  double bubble(const RankClasses& of) const;
};

/// Lays out a step of a run on the cluster that `cost` knows, from the programs of its classes'
/// representatives. Throws Error where the ranks wait for each other for ever, with what each waits
/// in and did last.
Replayed replay(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost);

}  // namespace usp
