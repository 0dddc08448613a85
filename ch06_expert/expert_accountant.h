#pragma once

#include <string>
#include <utility>

#include "data_parallel.h"
#include "memory.h"
#include "tensor_accountant.h"

namespace usp {

/// Bytes of rows that a rank of ep sends in a step where all experts are equally popular. Of the
/// T k rows of a micro-batch, (ep-1)/ep leave the rank: to the experts and back, and their
/// gradients the same way. Full recomputation sends forward's once more. Counts are not in it.
/// By node, T min(k, n) copies go to n nodes, with k gates each that come back as gradients, and
/// T k rows within the node.
int64_t predict_expert_traffic(const TrainConfig& config);

/// What layers with experts send over tp under sequence parallelism, less what an MLP in their
/// place would send; as predict_tensor_traffic() counts.
TensorTraffic expert_traffic_over_tp(const TrainConfig& config);

/// Of all rows that are sent over ep, or over its nodes.
StepTraffic traffic_of_experts(const Communicator& ep, const ExpertGroup& experts);

/// For the report: bytes that this rank has sent per step, beside the formula's.
std::pair<std::string, std::string> expert_traffic_row(const TrainConfig& config, int64_t bytes,
                                                       int64_t steps);

}  // namespace usp
