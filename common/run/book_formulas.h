#pragma once

#include <string_view>

#include "run/run_config.h"

namespace usp {

/// What the book's closed forms say, in bytes, to stand beside what a chapter's own formulas say.
///@{
/// Weights, gradients and optimizer states of a rank that shares nothing: 16 bytes a parameter, 20
/// with gradients in bf16 and summed in f32.
double book_whole_states(int64_t parameters, bool gradients_twice);
/// Activations of a GPT in mixed precision: L s b h (34 + 5 n_heads s / h) bytes, without the
/// second term under selective and 2 instead of the bracket under full recomputation. Korthikanti
/// et al. (2022), https://arxiv.org/abs/2205.05198.
double book_activations(const RunConfig& config, std::string_view recompute);
///@}

}  // namespace usp
