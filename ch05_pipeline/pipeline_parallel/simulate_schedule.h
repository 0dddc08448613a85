#pragma once

#include <string>
#include <vector>

#include "pipeline_parallel/schedule.h"

namespace usp {

/// How long work takes in each chunk, in any unit.
struct WorkTimes {
  double forward = 1, input_gradient = 1, weight_gradient = 1;
  double message = 0;  ///< from the end of an action to where another rank can use its output

  double of(Work work) const;  ///< an action's
};

/// When an action runs.
struct Interval {
  double begin = 0, end = 0;
};

/// A schedule laid out in time: every rank runs its actions in order, each as soon as what it needs
/// is there.
struct SimulatedSchedule {
  std::vector<std::vector<Interval>> intervals;  ///< of each rank's actions
  std::vector<double> busy;                      ///< of each rank
  /// The most chunks of micro-batches on each rank whose forward pass has begun and whose last
  /// gradient has not been computed.
  std::vector<int64_t> most_in_flight;
  double makespan = 0;  ///< from the first action's begin to the last one's end

  /// The book's r: what the ranks idle, over what they work, if all work alike.
  double bubble() const;
  /// The same where a rank's time counts from its own first action to its own last: what no step
  /// before or after can fill.
  double inner_bubble() const;
};

/// What pp_show prints: the table, its bubble, and who holds how many activations.
std::string to_report(const Schedule& schedule, const WorkTimes& times);
/// The same for plots: every action with its stage, its begin and its end.
std::string to_json(const Schedule& schedule, const WorkTimes& times);

/// Throws UsageError, which names rank, action and reason, unless in this schedule every
/// micro-batch passes every stage once, forward and backward, in an order that cannot wait for
/// itself.
void check_schedule(const Schedule& schedule, std::string_view name);

/// Whether ranks would wait for each other for ever.
bool deadlocks(const Schedule& schedule);

/// The schedule with a forward and a backward pass that follow one another in turns, wherever, when
/// the first of them begins, what the other one needs is there, too.
Schedule in_turns(Schedule schedule, const WorkTimes& times);

/// Throws Error where a schedule deadlocks.
SimulatedSchedule simulate_schedule(const Schedule& schedule, const WorkTimes& times);

}  // namespace usp
