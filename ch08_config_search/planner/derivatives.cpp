#include "planner/derivatives.h"

#include <cmath>

#include "planner/change.h"

namespace usp {

// [derivatives]
std::vector<Derivative> derivatives(const RecordedStep& step, const Timed& timed,
                                    const Cluster& cluster) {
  constexpr double kRounding = 1e-9;  // at most, of products and replays
  std::vector<Derivative> all;
  FoldedStep folded = step.fold();
  for (int i = 0; i < kResources; ++i) {
    const auto resource = Resource(i);
    const Cluster other = changed(cluster, std::string(name(resource)), kMore);
    const double now = timed.replayed.step;
    const double more = folded.seconds(other) / now - 1;
    const double change = std::abs(more) < kRounding ? 0 : more;
    const double old_path = step.along(timed, other) / now - 1;
    all.push_back({resource, timed.replayed.critical[i], change, old_path,
                   std::abs(change - old_path) > kRounding});
  }
  return all;
}
// [derivatives]

}  // namespace usp
