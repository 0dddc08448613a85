#pragma once

#include "tensor/tensor.h"
#include "train/model_config.h"

namespace usp {

/// Cosine and sine of every rotation angle, [positions, D/2], D the config's rotary_dim(). Su et
/// al. (2021), https://arxiv.org/abs/2104.09864; channel pairs (c, c + D/2), as in Hugging Face's
/// Llama.
struct RopeTable {
  Tensor cos, sin;
  RopeTable(const ModelConfig& config, int64_t positions, DType dtype);
};

}  // namespace usp
