#include "planner/derivatives.h"

#include <cmath>

#include "planner/change.h"

namespace usp {

// [derivatives]
std::vector<Derivative> derivatives(const RecordedStep& step, const Timed& timed,
                                    const Cluster& cluster) {
  constexpr double kSame = 1e-9;  // more than rounding
  std::vector<Derivative> all;
  FoldedStep folded = step.fold();
  for (int i = 0; i < kResources; ++i) {
    const auto resource = Resource(i);
    const Cluster other = changed(cluster, std::string(name(resource)), kMore);
    const double now = timed.replayed.step;
    const double change = folded.seconds(other) / now - 1;
    const double old_path = step.along(timed, other) / now - 1;
    all.push_back({resource, timed.replayed.critical[i], change, old_path,
                   std::abs(change - old_path) > kSame});
  }
  return all;
}
// [derivatives]

}  // namespace usp
