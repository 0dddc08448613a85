#pragma once

#include <functional>

#include "base/peers.h"
#include "run/estimate.h"

namespace usp {

/// What the formulas say of the configuration as it is, on the rank that needs most.
using Predict = std::function<Prediction()>;

/// Throws UsageError where the ranks of this machine need more memory than is available there, on
/// any machine: what they need, what there is, and flags that fit. `predict` reads `config`, which
/// is changed for a while to find these. All ranks call it.
///
/// The environment variable USP_AVAILABLE_MEMORY, in bytes, stands in for the memory of the
/// machine.
void check_memory(RunConfig& config, const Predict& predict, const Peers& peers);

}  // namespace usp
