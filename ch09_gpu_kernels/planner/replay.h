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
  double end = 0;                         ///< of its step, on the clock that all ranks share
  /// The step in parts that add up to it: "forward matmul", "backward attention", what it waits for
  /// ("tp", "dp", "bubble", "launch"), and "tail", all that comes behind the last gradient.
  std::map<std::string, double> parts;
};

/// What can lie on the way to a step's end: a launch, a kernel, an exchange until the next of its
/// queue may begin or until it has arrived. `what`: its index in the program of this class.
struct PathPoint {
  /// What it is.
  enum Kind : int32_t { launch, kernel, busy, arrives };
  int32_t of_class;
  Kind kind;
  int32_t what;

  auto operator<=>(const PathPoint&) const = default;
};

/// The longest way through a step: how often each point lies on it. Of the way to the step's end
/// it is what the way to its begin has not; where that has more of a point, the number is negative.
using CriticalPath = std::map<PathPoint, int64_t>;

/// A step, laid out in time.
struct Replayed {
  double step = 0;                ///< from the end of a step to that of the next, of the last rank
  double gradients = 0;           ///< until the last rank has all of its gradients
  std::vector<RankTime> classes;  ///< of each class's representative
  CriticalPath path;
  ResourceSeconds critical{};  ///< of the path, by what its seconds depend on: the step, in all

  /// Share of the step that the exposed time of groups of this name takes, over all ranks.
  double exposed(const RankClasses& of, const std::string& group) const;
  /// The share of the step in which ranks wait for other stages.
  double bubble(const RankClasses& of) const;
  /// The class whose rank ends last.
  int last() const;
};

/// The dimension that a group belongs to: "dp", "tp", "cp", "ep" or "pp".
std::string dimension_of(const std::string& group);

/// What a representative did in the last step that was laid out: its device, which computed or
/// waited, or an exchange on its link.
struct TimelineSlice {
  double begin = 0, end = 0;
  int64_t event = 0;     ///< of its program: the op, the wait, or the post
  bool is_sent = false;  ///< an exchange
};

/// What a path takes where `cost` says what its points take, by what that depends on.
ResourceSeconds seconds_of(const CriticalPath& path, const std::vector<Program>& programs,
                           Cost& cost);

/// Lays out a step of a run on the cluster that `cost` knows, from the programs of its classes'
/// representatives. Throws Error where the ranks wait for each other for ever, with what each waits
/// in and did last. `slices`: gets those of each class.
Replayed replay(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost,
                std::vector<std::vector<TimelineSlice>>* slices = nullptr);

}  // namespace usp
