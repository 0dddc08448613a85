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
/// again. 2 · layers · samples · capacity · G · D numbers, taken at the first append. Who caches
/// something else of a position, such as a latent vector, appends that as one head: layers ·
/// samples · capacity · width numbers.
class KvCache {
 public:
  /// Which of several caches this is, each of which holds as many positions of the same text.
  struct Share {
    int64_t rank = 0;
    int64_t ranks = 1;
  };

  /// `capacity`: the largest number of positions.
  explicit KvCache(int64_t capacity) : capacity_(capacity) {}

  /// Writes kv [B, S, 2G, D], G key then G value heads (or [B, S, 1, width]), of S consecutive
  /// positions, and forgets what `layer` had from there on. Returns [B, positions.end(), 2G, D], a
  /// view: all that the queries at these positions may see. Throws Error beyond the capacity, and
  /// where positions in between were never written.
  ///
  /// With a share, writes and returns those at first_position(share) and behind it alone.
  Tensor append(const void* layer, const Tensor& kv, const Positions& positions,
                const Share& share);
  Tensor append(const void* layer, const Tensor& kv, const Positions& positions) {
    return append(layer, kv, positions, {});
  }
  int64_t first_position(const Share& share) const { return share.rank * room(share); }

 private:
  int64_t room(const Share& share) const { return (capacity_ + share.ranks - 1) / share.ranks; }

  struct Entry {
    Tensor kv;           ///< [B, room for the share, 2G, D]
    int64_t length = 0;  ///< positions written, in this cache or in others
  };

  int64_t capacity_;
  std::map<const void*, Entry> entries_;  ///< by layer
};

}  // namespace usp
