#pragma once

#include <string>

#include "expert_parallel/moe.h"
#include "rank_view.h"

namespace usp {

/// Which layer becomes a mixture of experts, and how its weights begin.
struct MixtureOptions {
  int64_t layer;
  std::string prefix;                ///< of the names of its weights, such as "model.layers.0."
  double init_std, output_init_std;  ///< of its weights; of those that write to the residual stream
};

/// The second half of a layer as a mixture of experts: dispatch, experts, combine. Adds its weights
/// to the list, and its segments to the block.
void add_mixture(const ModelConfig& config, const MixtureOptions& options, const RankView& view,
                 ParameterList& parameters, Block& block);

}  // namespace usp
