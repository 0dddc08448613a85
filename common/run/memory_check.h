#pragma once

#include <functional>
#include <string>

#include "base/peers.h"
#include "run/estimate.h"

namespace usp {

/// What the formulas say of the configuration as it is, on the rank that needs most.
using Predict = std::function<Prediction()>;

/// "3.5 GiB", or MiB where that is less than one.
std::string in_units(double bytes);

/// Bytes of a memory that so many ranks share: of this rank's GPU, or of its machine.
struct SharedMemory {
  int64_t ranks;
  double of_each;    ///< that each of them needs
  double available;  ///< to all of them

  double needed() const { return of_each * double(ranks); }
};
/// All ranks call it.
SharedMemory shared_memory(const RunConfig& config, const Predict& predict, const Peers& peers);

/// Throws UsageError where the ranks of this machine need more memory than is available there, on
/// any machine: what they need, what there is, and flags that fit. `predict` reads `config`, which
/// is changed for a while to find these. All ranks call it.
///
/// The environment variable USP_AVAILABLE_MEMORY, in bytes, stands in for the memory of the
/// machine.
void check_memory(RunConfig& config, const Predict& predict, const Peers& peers);

}  // namespace usp
