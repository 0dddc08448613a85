#pragma once

#include <limits>

#include "planner/classes_of_ranks.h"
#include "planner/cost.h"

namespace usp {

/// What ranks take from each other, which replay() leaves out.
struct Sharing {
  /// What becomes of exchanges that a rank sends over one kind of link at once.
  enum Links : uint8_t {
    apart,     ///< each has the link to itself
    fair,      ///< they divide it
    in_turns,  ///< one after the other, as they become ready; of recorded runs alone
  };
  Links links = fair;
  double beside = 1;  ///< the share of its speed that a kernel has beside an exchange of its rank
  /// So many ranks compute at full speed; where more do, they divide that.
  double cores = std::numeric_limits<double>::infinity();
};

// [shared]
/// Seconds of the step that replay() lays out, where ranks share like this: the speed of whatever
/// is under way changes whenever something begins or ends. So no sum of fixed seconds says when.
/// Throws Error where the ranks wait for each other for ever.
double shared_step(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost,
                   const Sharing& sharing);
// [shared]

/// What the events of a program take, in seconds or any other unit: by cost, or as a run measured.
struct ProgramSeconds {
  std::vector<double> kernels;             ///< of each
  std::vector<ExchangeSeconds> exchanges;  ///< of each shape
  /// The links that the rank keeps during each, where they serve exchanges in turns: 1 the one
  /// inside the node, 2 the one beyond it, 3 both.
  std::vector<uint8_t> keeps;
};

/// When a rank of a recorded run did what its program says, from the run's begin on.
struct RecordedRank {
  /// From when to when; for ever where it did not end.
  struct Span {
    double begin, end;
  };
  std::vector<double> posts;    ///< of each post, as far as it came
  std::vector<Span> exchanges;  ///< of each post, its exchange; of a receipt nothing is said
  std::vector<Span> waits;      ///< of each wait, as far as it came
  double end = 0;               ///< of its program
};

/// A recorded run, laid out in time.
struct RecordedRun {
  /// From a time on, the share of its speed at which a rank computes.
  struct Speed {
    double from, share;
  };
  std::vector<RecordedRank> ranks;
  std::vector<Speed> speeds;
};

/// Lays out a run once, from the program of each rank and the seconds that were measured. Ranks
/// that wait for each other for ever have a last wait that does not end.
RecordedRun replay_recorded(const std::vector<Program>& programs,
                            const std::vector<ProgramSeconds>& seconds, const Sharing& sharing);

}  // namespace usp
