#pragma once

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
  int64_t row_shares = 1;  ///< ranks that shard the rows of the residual stream

  /// Rows that lie here, of the T rows of the residual stream.
  int64_t rows() const { return tokens() / row_shares; }
  int64_t tokens() const { return num_samples * seq_len; }  ///< T
  int64_t own() const { return bytes_of(dtype); }           ///< bytes of a number
  int64_t acc() const { return bytes_of(accumulate_dtype(dtype)); }
};

/// Bytes of one kind of tensor, by its name in the memory profile.
struct NamedBytes {
  std::string_view name;
  int64_t bytes = 0;

  bool operator==(const NamedBytes&) const = default;
};

/// What a piece of the model keeps from forward to backward of one micro-batch, as formulas of its
/// own (local) shapes. What else it asks for meanwhile is no formula: fold() runs it and sees.
struct Footprint {
  std::vector<NamedBytes> kept = {};  ///< made in forward, alive until backward returns
  std::vector<NamedBytes> kept_through_recompute = {};  ///< of `kept`, even where the block is
  NamedBytes output = {};  ///< y, unless `kept` lists it: the next piece keeps it, as its x
  bool keeps_x = true;     ///< backward reads x; else `kept` lists what it reads instead

  /// For a piece made of others: what `part` keeps, and part's output where backward needs that.
  void keep(const std::vector<NamedBytes>& part, const NamedBytes& output = {});
  bool operator==(const Footprint&) const = default;
};

/// The segments of a block, in the order of forward.
struct BlockFootprint {
  int64_t block;
  bool recomputed;  ///< as a whole: backward runs forward again
  std::vector<Footprint> segments;

  /// Whether it is of the same kind: keeps as much of the same.
  bool is_like(const BlockFootprint& other) const {
    return recomputed == other.recomputed && segments == other.segments;
  }
};

/// What the forward pass of one micro-batch leaves for backward: by block and name, as
/// saved_activations() finds it.
std::vector<LiveBytes> kept_bytes(const std::vector<BlockFootprint>& blocks);

}  // namespace usp
