#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "tensor/dtype.h"
#include "tensor/memory_profile.h"

namespace usp {

/// What a formula of memory reads of a pass over one micro-batch.
struct PassShape {
  int64_t num_samples;  ///< B
  int64_t seq_len;      ///< S
  DType dtype;
  int64_t row_shares = 1;  ///< ranks that share out the rows of the residual stream

  /// Of the T rows of the residual stream, those that lie here.
  int64_t rows() const { return tokens() / row_shares; }
  int64_t tokens() const { return num_samples * seq_len; }  ///< T
  int64_t own() const { return bytes_of(dtype); }           ///< bytes of a number
  int64_t acc() const { return bytes_of(accumulate_dtype(dtype)); }
};

/// Bytes of one kind of tensor, by its name in the memory profile.
struct NamedBytes {
  std::string_view name;
  int64_t bytes = 0;
};

/// The activations that a piece of the model makes for one micro-batch, as formulas of its own
/// (local) shapes. A gradient has the bytes of its tensor: dy those of y, dx those of x.
///
/// The peaks count what is alive at a time besides `kept`, `recomputed`, x and dy.
struct Footprint {
  std::vector<NamedBytes> kept = {};  ///< made in forward, alive until backward returns
  std::vector<NamedBytes> kept_through_recompute = {};  ///< of `kept`, even where the block is
  NamedBytes output = {};     ///< y, unless `kept` lists it: the next piece keeps it, as its x
  bool keeps_x = true;        ///< backward reads x; else `kept` lists what it reads instead
  int64_t recomputed = 0;     ///< made anew where backward begins, alive until it returns
  int64_t forward_peak = 0;   ///< with y
  int64_t unread = 0;         ///< of that, what a block that runs again need not make at its end
  int64_t backward_peak = 0;  ///< with dx
  /// Made in forward for the next piece, which takes it over, and in backward for the one before,
  /// with dy where that is passed on. The peaks are besides what this piece was handed.
  int64_t handed = 0, handed_back = 0;
  /// x and dy of its weights' gradients, where those wait: alive after backward has returned.
  int64_t held = 0;
  /// Of these, a dy that backward made itself; and the peak where it stays.
  int64_t held_dy = 0, split_peak = 0;

  /// For a piece made of others: what `part` keeps, and part's output where backward needs that.
  void keep(const std::vector<NamedBytes>& part, const NamedBytes& output = {});
};

/// The segments of a block, in the order of forward.
struct BlockFootprint {
  int64_t block;
  bool recomputed;  ///< as a whole: backward runs forward again
  std::vector<Footprint> segments;
};

/// What the forward pass of one micro-batch leaves for backward: by block and name, as
/// saved_activations() finds it.
std::vector<LiveBytes> kept_bytes(const std::vector<BlockFootprint>& blocks);
/// What one micro-batch asks of memory on its way through consecutive blocks, besides the x that
/// the first of them reads.
struct PassBytes {
  int64_t forward_peak = 0;
  int64_t kept = 0;           ///< between forward and backward, with the last block's output
  int64_t backward_peak = 0;  ///< with what is kept, and the gradients of x and of the output
  int64_t split_peak = 0;     ///< the same where the gradients of weights wait
  int64_t held = 0;           ///< for them, from then on
};
/// Of a chunk of a model, for example.
PassBytes pass_bytes(const std::vector<BlockFootprint>& blocks);
/// The most that is alive at a time in forward and backward of one micro-batch.
int64_t peak_bytes(const std::vector<BlockFootprint>& blocks);

}  // namespace usp
