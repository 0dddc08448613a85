#pragma once

#include <string>
#include <vector>

#include "planner/timed.h"

namespace usp {

/// What a step has to do with one of a cluster's numbers.
struct Derivative {
  Resource of;
  double on_path = 0;     ///< seconds of the critical path that depend on it
  double change = 0;      ///< of the step with 10 % more of it, as a share of the step
  double old_path = 0;    ///< the same, if the critical path stayed the one that it is
  bool new_path = false;  ///< it does not
};

constexpr double kMore = 1.1;  ///< what a derivative compares with

/// One for each resource: of one record, the replay on the cluster, `timed`, beside products of
/// matrices on clusters of which a number is 10 % larger.
std::vector<Derivative> derivatives(const RecordedStep& step, const Timed& timed,
                                    const Cluster& cluster);

}  // namespace usp
