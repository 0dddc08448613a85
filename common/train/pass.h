#pragma once

#include <cstdint>
#include <functional>

#include "tensor/documents.h"
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
  uint64_t seed = 0;         ///< of the run
  int64_t micro_batch = 0;   ///< of its step on this rank
  int64_t part = 0;          ///< of the micro-batch, where parts of it run in turns
  int64_t first_sample = 0;  ///< of all that the run reads, in the order of the steps
  int64_t num_samples = 0;   ///< B
  Positions positions;       ///< of the S tokens of every sample
  int64_t seq_len = 0;       ///< of a whole sample, of which other ranks may hold the rest
  Documents documents = {};  ///< in which the rows of attention lie; undefined: a sample is one
  Tensor tokens;             ///< [T] i32
  Tensor targets;            ///< [T] i32; undefined where only logits are wanted
  double loss_scale = 0;  ///< 1 / target tokens of the global batch: the loss is divided here, once
  Tensor loss;            ///< [1] f64, to which the head adds
  KvCache* kv_cache = nullptr;  ///< decode: holds the earlier positions and takes these ones
};
// [pass]

/// Calls body(row, count, token) for each run of consecutive tokens in rows [first, first + rows):
/// `count` of them from `first` + row on; `token` counts the tokens of all that the run reads.
void each_run(const Pass& pass, int64_t first, int64_t rows,
              const std::function<void(int64_t row, int64_t count, int64_t token)>& body);

/// Last row of every sample of x [T, H]: [B, H].
Tensor last_positions(const Tensor& x, const Pass& pass);

}  // namespace usp
