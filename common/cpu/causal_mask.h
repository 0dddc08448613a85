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
/// tiles with a position that no query sees. With documents, begins [B, S], each query's window
/// begins with its document.
class CausalMask {
 public:
  CausalMask(const Positions& queries, const Positions& keys, const Tensor& begins)
      : queries_(workspace({queries.count()}, DType::i32)),
        keys_(workspace({round_up(keys.count(), kKeyTile)}, DType::i32)),
        tiles_(workspace({keys_.numel() / kKeyTile, 2}, DType::i32)),
        query_(queries_.data<int32_t>()),
        key_(keys_.data<int32_t>()),
        tile_(tiles_.data<int32_t>()),
        begins_(begins.defined() ? begins.data<int32_t>() : nullptr) {
    for (int64_t i = 0; i < queries.count(); ++i) {
      query_[i] = static_cast<int32_t>(queries[i]);
      last_query_ = std::max(last_query_, query_[i]);
    }
    for (int64_t i = 0; i < keys_.numel(); ++i) {
      key_[i] = i < keys.count() ? static_cast<int32_t>(keys[i]) : kNever;
    }
    const int32_t* key = key_;
    for (int64_t tile = 0; tile < num_tiles(); ++tile, key += kKeyTile) {
      tile_[2 * tile] = *std::min_element(key, key + kKeyTile);
      tile_[2 * tile + 1] = *std::max_element(key, key + kKeyTile);
    }
  }

  const int32_t* keys() const { return key_; }
  int64_t num_tiles() const { return tiles_.size(0); }
  /// The largest position of a query; -1 if there is none.
  int32_t last_query() const { return last_query_; }

  /// What query `row` of a sample sees.
  Window window(int64_t sample, int64_t row) const {
    const int32_t from = begins_ == nullptr ? 0 : begins_[sample * queries_.numel() + row];
    return {from, query_[row]};
  }
  /// Whether all keys of a tile lie in the window.
  bool sees_all(Window window, int64_t tile) const {
    return window.from <= lowest(tile) && highest(tile) <= window.to;
  }
  /// How many keys of a tile there are up to the last one in the window.
  int64_t num_seen(Window window, int64_t tile) const {
    if (sees_all(window, tile)) return kKeyTile;
    if (lowest(tile) > window.to || highest(tile) < window.from) return 0;
    const int32_t* key = keys() + tile * kKeyTile;
    int64_t count = kKeyTile;
    while (count > 0 && (key[count - 1] > window.to || key[count - 1] < window.from)) --count;
    return count;
  }
  /// How many keys there are, in whole tiles, up to the last one in the window.
  int64_t num_seen(Window window) const {
    int64_t tile = num_tiles();
    while (tile > 0 && lowest(tile - 1) > window.to) --tile;
    return tile * kKeyTile;
  }

 private:
  int32_t lowest(int64_t tile) const { return tile_[2 * tile]; }
  int32_t highest(int64_t tile) const { return tile_[2 * tile + 1]; }

  static constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

  Tensor queries_;                 ///< [queries]
  Tensor keys_;                    ///< [tiles * kKeyTile]
  Tensor tiles_;                   ///< [tiles, 2]: lowest and highest position
  int32_t *query_, *key_, *tile_;  ///< their elements
  const int32_t* begins_;          ///< [B, queries] or nullptr
  int32_t last_query_ = -1;
};

}  // namespace usp::cpu
