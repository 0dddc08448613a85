#pragma once

#include <algorithm>
#include <limits>

#include "cpu/microkernel.h"
#include "cpu/parallel.h"
#include "tensor/positions.h"

namespace usp::cpu {

/// Keys are looked at in tiles of this many: whole panels for every SIMD width, and whole groups of
/// kTileRows.
inline constexpr int64_t kKeyTile = 96;

/// Who sees whom in causal attention: positions of all queries and keys, the keys padded to whole
/// tiles with a position that no query sees.
class CausalMask {
 public:
  CausalMask(const Positions& queries, const Positions& keys)
      : queries_(workspace({queries.count()}, DType::i32)),
        keys_(workspace({round_up(keys.count(), kKeyTile)}, DType::i32)),
        tiles_(workspace({keys_.numel() / kKeyTile, 2}, DType::i32)) {
    int32_t* query = queries_.data<int32_t>();
    for (int64_t i = 0; i < queries.count(); ++i) query[i] = static_cast<int32_t>(queries[i]);
    int32_t* key = keys_.data<int32_t>();
    for (int64_t i = 0; i < keys_.numel(); ++i) {
      key[i] = i < keys.count() ? static_cast<int32_t>(keys[i]) : kNever;
    }
    for (int64_t tile = 0; tile < num_tiles(); ++tile, key += kKeyTile) {
      tiles_.data<int32_t>()[2 * tile] = *std::min_element(key, key + kKeyTile);
      tiles_.data<int32_t>()[2 * tile + 1] = *std::max_element(key, key + kKeyTile);
    }
  }

  const int32_t* queries() const { return queries_.data<int32_t>(); }
  const int32_t* keys() const { return keys_.data<int32_t>(); }
  int64_t num_tiles() const { return tiles_.size(0); }

  /// Whether a query at `position` sees all keys of a tile.
  bool sees_all(int32_t position, int64_t tile) const {
    return tiles_.data<int32_t>()[2 * tile + 1] <= position;
  }
  /// How many keys of a tile there are up to the last one that a query at `position` sees.
  int64_t num_seen(int32_t position, int64_t tile) const {
    if (sees_all(position, tile)) return kKeyTile;
    if (tiles_.data<int32_t>()[2 * tile] > position) return 0;
    const int32_t* key = keys() + tile * kKeyTile;
    int64_t count = kKeyTile;
    while (key[count - 1] > position) --count;
    return count;
  }
  /// How many keys there are, in whole tiles, up to the last one that a query at `position` sees.
  int64_t num_seen(int32_t position) const {
    int64_t tile = num_tiles();
    while (tile > 0 && tiles_.data<int32_t>()[2 * tile - 2] > position) --tile;
    return tile * kKeyTile;
  }

 private:
  static constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

  Tensor queries_;  ///< [queries]
  Tensor keys_;     ///< [tiles * kKeyTile]
  Tensor tiles_;    ///< [tiles, 2]: lowest and highest position
};

}  // namespace usp::cpu
