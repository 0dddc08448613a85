#pragma once

#include <map>

#include "tensor/positions.h"
#include "tensor/tensor.h"

namespace usp {

/// Keys and values of a text's earlier positions, layer by layer, so that the next token needs a
/// pass over itself alone. Keys are kept rotated, each by its position; a text that outgrows the
/// cache is cut, and starts again at position 0.
///
/// The memory counts as activations: what attention computed for a position and a later pass reads
/// again. 2 · layers · samples · capacity · G · D numbers, taken at the first append.
class KvCache {
 public:
  /// `capacity`: the largest number of positions.
  explicit KvCache(int64_t capacity) : capacity_(capacity) {}

  /// Writes kv [B, S, 2G, D], G key then G value heads, of S consecutive positions, and forgets
  /// what `layer` had from there on. Returns [B, positions.end(), 2G, D], a view: all that the
  /// queries at these positions may see. Throws Error beyond the capacity, and where positions in
  /// between were never written.
  Tensor append(const void* layer, const Tensor& kv, const Positions& positions);

 private:
  struct Entry {
    Tensor kv;           ///< [B, capacity, 2G, D]
    int64_t length = 0;  ///< positions written
  };

  int64_t capacity_;
  std::map<const void*, Entry> entries_;  ///< by layer
};

}  // namespace usp
