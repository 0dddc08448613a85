#pragma once

#include <cstdint>

#include "tensor/positions.h"
#include "tensor/tensor.h"
#include "train/kv_cache.h"

namespace usp {

// [pass]
/// A pass over one micro-batch of T = B S tokens: what it reads, and what it is for.
struct Pass {
  /// `recompute`: forward again, for what the first forward did not keep. `eval`: a loss without a
  /// backward pass. `decode`: logits of a text that grows, from a cache of its earlier positions.
  enum class Mode { train, recompute, eval, decode };

  Mode mode = Mode::train;
  int64_t micro_batch = 0;  ///< of its step on this rank
  int64_t num_samples = 0;  ///< B
  Positions positions;      ///< of the S tokens of every sample
  Tensor tokens;            ///< [T] i32
  Tensor targets;           ///< [T] i32; undefined where only logits are wanted
  double loss_scale = 0;  ///< 1 / target tokens of the global batch: the loss is divided here, once
  Tensor loss;            ///< [1] f64, to which the head adds
  KvCache* kv_cache = nullptr;  ///< decode: holds the earlier positions and takes these ones
};
// [pass]

}  // namespace usp
