#pragma once

#include "config.h"
#include "run/estimate.h"

namespace usp {

/// The numbers that a model of this shape learns: matrices, norms and the embedding.
int64_t num_parameters(const ModelConfig& config);
/// States of a rank that holds this many parameters and shards none of them.
StateBytes whole_states(int64_t parameters, const TrainConfig& config);
/// Floating-point operations that training on one token needs: 6 per weight of a matmul (a lookup
/// is none), and 12 L h keys for attention (h: the width of all query heads). A query meets
/// (seq_len + 1) / 2 keys on average below the causal mask; the book counts seq_len.
double model_flops_per_token(const ModelConfig& config, double keys);

/// What a step of this run needs on one of its ranks, by all formulas.
// [predict]
Prediction predict(const TrainConfig& config, int rank = 0);
// [predict]

}  // namespace usp
