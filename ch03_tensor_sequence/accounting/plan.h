#pragma once

#include <string>

#include "config.h"

namespace usp {

/// The plan of the batch that the run asks for: plan_batch() of common/run, by dry runs.
std::string plan_batch(TrainConfig config);

}  // namespace usp
