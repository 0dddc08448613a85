#pragma once

#include "accounting/memory.h"
#include "accounting/tensor_accountant.h"
#include "run/traffic.h"

namespace usp {

/// Bytes of rows that a rank of the world sends over ep in a step where all experts are equally
/// popular. Of the T k rows of a micro-batch, (ep-1)/ep leave the rank: to the experts and back,
/// and their gradients the same way. Full recomputation sends forward's once more. Counts are not
/// in it. By node, T min(k, n) copies go to n nodes, with k gates each that come back as gradients,
/// and T k rows within the node.
int64_t predict_expert_traffic(const TrainConfig& config, int rank = 0);

/// Rows that a rank of ep has of a micro-batch, where all experts are equally popular.
struct RowsOfRank {
  int64_t copies;   ///< of tokens that are in its node
  int64_t choices;  ///< of its own experts
};
/// Rows of each rank of ep; nothing where the model has no experts.
std::vector<RowsOfRank> even_rows_of_ranks(const TrainConfig& config);
/// Both of them, by which ranks differ.
std::vector<RankTrait> expert_traits(const TrainConfig& config);

/// Whether tp cuts MLPs, shared experts or experts into parts of different lengths.
bool tp_cuts_unevenly(const TrainConfig& config);

/// What layers with experts send over tp under sequence parallelism, less what an MLP in their
/// place would send; as predict_tensor_traffic() counts.
TensorTraffic expert_traffic_over_tp(const TrainConfig& config);

/// The rows that this rank sends over ep in a step, or over its nodes.
Traffic traffic_of(const ExpertConfig& experts, const TrainConfig& config, const DryRank& dry);

}  // namespace usp
