#pragma once

#include <string>
#include <vector>

#include "planner/actions.h"
#include "planner/cost.h"
#include "planner/max_plus.h"

namespace usp {

/// When a step ends.
struct ScheduleTime {
  double step = 0;       ///< seconds, from the end of a step to that of the next, of the last rank
  double gradients = 0;  ///< until the last rank has all of its gradients
};

/// What replay() finds of a step's time, by products of max-plus matrices: each action of a
/// schedule is folded into one, and a step multiplies a rank's clocks by one after the other.
class ScheduleReplay {
 public:
  /// Takes the programs of the classes' representatives.
  ScheduleReplay(const std::vector<Program>& programs, const RankClasses& classes);

  /// Makes the matrices, in this cluster's seconds; exchanges of the dimension `without` (such as
  /// "tp") take none.
  void price(Cost& cost, const std::string& without = "");
  /// Multiplies, in the seconds of the last price(). Throws Error where the ranks wait for each
  /// other for ever; replay() says in what.
  ScheduleTime time() const;

  /// How much folding leaves of a step.
  struct Size {
    int64_t events = 0;    ///< of a step, over the classes
    int64_t products = 0;  ///< of matrix and clocks in their place
    int64_t blocks = 0;    ///< matrices of blocks that differ
    int64_t actions = 0;   ///< products of those that differ
    int64_t clocks = 0;    ///< of the class that has most
  };
  Size size() const;  ///< of this step
  /// The matrix of an action of a class, in the seconds of the last price().
  const MaxPlus& matrix(int of_class, int action) const;
  /// The program of a class whose actions these are.
  const ActionProgram& folded(int of_class) const { return classes_[of_class].folded; }

 private:
  /// A queue of a class.
  struct Place {
    int of_class, queue;
  };
  struct FoldedClass {
    ActionProgram folded;
    std::vector<Kernel> kernels;
    std::vector<Exchange> exchanges;
    std::vector<ProgramGroup> groups;
    int64_t events;
    std::vector<std::vector<int32_t>> posts;  ///< of each queue in a step, their shapes
    std::vector<std::vector<Place>> sources;  ///< of each shape of exchange: whose times decide
    int32_t first_action = 0, first_exchange = 0;  ///< places in `actions_`, `busy_`
  };
  /// Finds times from those that earlier moves have found.
  struct Move {
    /// What a move does.
    enum Kind : int32_t {
      act,   ///< a matrix times the class's clocks and what is read: the clocks, and its outputs
      meet,  ///< an exchange begins with the latest of what is read
      look,  ///< how late it is in the class
      end,   ///< likewise; and there the host waits for its device
    };
    Kind kind;
    int32_t what;          ///< number of the action's matrix, of the exchange
    int32_t clocks;        ///< the first of its class
    int32_t first, count;  ///< in `reads_`
    int32_t into;          ///< the first time that it finds
  };
  class Order;

  void link(FoldedClass& of, const RankClasses& classes) const;

  std::vector<FoldedClass> classes_;
  std::vector<MaxPlus> actions_;  ///< of all classes
  std::vector<double> busy_;      ///< of each shape of exchange, of all classes
  // A step does the same in the same order, whatever it takes.
  std::vector<Move> moves_;
  std::vector<int32_t> reads_;  ///< numbers of times
  int32_t times_ = 0;           ///< how many there are
  bool ends_ = false;           ///< no rank waits for ever
};

}  // namespace usp
