#pragma once

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

#include "kernels/attention/ladder.h"

/// How much falls to each multiprocessor under a causal mask, by the order in which blocks begin.
namespace usp::lab {

inline constexpr int kMultiprocessors = 132;  ///< of an H100

/// Which turn the block of a number has.
using TurnOf = attention::Turn (*)(const attention::Shape& x, int block, int rows);

inline attention::Turn lightest_by_head(const attention::Shape& x, int block, int rows) {
  const int down = (x.queries + rows - 1) / rows;
  return {block / down, block % down * rows};
}
inline attention::Turn heaviest_by_head(const attention::Shape& x, int block, int rows) {
  const int down = (x.queries + rows - 1) / rows;
  return {block / down, (down - 1 - block % down) * rows};
}
/// Order of the kernels.
inline attention::Turn heaviest_of_all(const attention::Shape& x, int block, int rows) {
  return x.turn(block, rows);
}

/// Blocks of a launch, and tiles of all of them and of the busiest multiprocessor.
struct Load {
  int64_t blocks = 0, all = 0, busiest = 0;
  double mean() const { return static_cast<double>(all) / kMultiprocessors; }
};

/// Tiles of a turn.
inline int64_t tiles_of(const attention::Shape& x, const attention::Turn& turn, int rows,
                        int tile) {
  return x.tiles_seen(turn.head / x.heads, turn.first, rows, tile).count;
}

/// Each multiprocessor holds one block, and takes the next as soon as it has gone over its tiles,
/// of which the block of a number has tiles_of(number).
template <class TilesOf>
Load load_in_order(int64_t blocks, const TilesOf& tiles_of) {
  std::vector<int64_t> none(kMultiprocessors);
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> busy({}, std::move(none));
  Load load{blocks};
  for (int block = 0; block < blocks; ++block) {
    const int64_t tiles = tiles_of(block), until = busy.top() + tiles;
    busy.pop();
    busy.push(until);
    load.all += tiles;
    load.busiest = std::max(load.busiest, until);
  }
  return load;
}

/// The load of blocks that keep queries.
inline Load load_of(const attention::Shape& x, int rows, int tile, TurnOf turn_of) {
  return load_in_order(x.turns(rows),
                       [&](int block) { return tiles_of(x, turn_of(x, block, rows), rows, tile); });
}

/// The load of blocks that keep keys, as backward has them: of all heads side by side, the first
/// keys first, or the last.
inline Load load_of_keys(const attention::Shape& x, int rows, int tile, bool first_keys_first) {
  const int heads = x.samples * x.kv_heads, across = (x.keys + rows - 1) / rows;
  return load_in_order(int64_t{heads} * across, [&](int block) {
    const int number = block / heads, own = first_keys_first ? number : across - 1 - number;
    return x.tiles_seeing(block % heads / x.kv_heads, own * rows, rows, tile).count;
  });
}

/// Tiles of all turns that a block of a persistent kernel takes.
inline int64_t tiles_of_block(const attention::Shape& x, int block, int blocks, int rows,
                              int tile) {
  int64_t tiles = 0;
  for (int round = 0;; ++round) {
    const int number = x.number_of_turn(round, block, blocks);
    if (number >= x.turns(rows)) return tiles;
    tiles += tiles_of(x, x.turn(number, rows), rows, tile);
  }
}

/// Each multiprocessor holds one block, whose turns are known from the start.
inline Load load_of_persistent(const attention::Shape& x, int rows, int tile,
                               int multiprocessors = kMultiprocessors) {
  Load load;
  load.blocks = std::min(multiprocessors, x.turns(rows));
  for (int block = 0; block < load.blocks; ++block) {
    const int64_t own = tiles_of_block(x, block, static_cast<int>(load.blocks), rows, tile);
    load.all += own;
    load.busiest = std::max(load.busiest, own);
  }
  return load;
}

/// A sample of so many heads and positions, of which a query sees those before it.
inline attention::Shape causal_sample(int heads, int length) {
  return {1, length, length, heads, heads, 128, /*causal=*/true};
}

}  // namespace usp::lab
