#include "accounting/traffic.h"

#include "accounting/tensor_accountant.h"
#include "accounting/zero_accountant.h"

namespace usp {

std::vector<Traffic> step_traffic(const TrainConfig& config, int rank) {
  const DryRank dry(config, rank);
  std::vector<Traffic> rows;
  TrainConfig(config).each_part([&](const auto& part) {
    if constexpr (requires { traffic_of(part, config, dry); }) {
      rows.push_back(traffic_of(part, config, dry));
    }
  });
  return rows;
}

}  // namespace usp
