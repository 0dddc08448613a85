#pragma once

#include "config.h"
#include "run/estimate.h"

namespace usp {

int64_t num_parameters(const ModelConfig& config);
/// Of a rank that holds all of the model.
StateBytes whole_states(const TrainConfig& config);
/// The book's formula for weights, gradients and optimizer states of such a rank: 16 bytes a
/// parameter, 20 with gradients summed in f32.
double book_whole_states(const TrainConfig& config);
/// The book's formula for activations, of a GPT in mixed precision: L s b h (34 + 5 n_heads s / h)
/// bytes, without the second term under selective and 2 instead of the bracket under full
/// recomputation. Korthikanti et al. (2022).
double book_activations(const TrainConfig& config);
/// Floating-point operations that training on one token needs: 6 per weight of a matmul (a lookup
/// is none), and 12 L h keys for attention (h: the width of all query heads). A query meets
/// (seq_len + 1) / 2 keys on average below the causal mask; the book counts seq_len.
double model_flops_per_token(const ModelConfig& config, double keys);

/// What a step of this run needs on one of its ranks, by all formulas.
Prediction predict(const TrainConfig& config);

}  // namespace usp
