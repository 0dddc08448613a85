#pragma once

#include <vector>

#include "config.h"
#include "run/traffic.h"

namespace usp {

/// What a rank of the world sends in a step. A technique gives its row by a traffic_of() for its
/// part of the configuration.
std::vector<Traffic> step_traffic(const TrainConfig& config, int rank);

}  // namespace usp
