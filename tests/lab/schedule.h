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

/// Each multiprocessor holds one block, and takes the next as soon as it has gone over its tiles.
inline Load load_of(const attention::Shape& x, int rows, int tile, TurnOf turn_of) {
  std::vector<int64_t> none(kMultiprocessors);
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> busy({}, std::move(none));
  Load load;
  load.blocks = int64_t{x.samples} * x.heads * ((x.queries + rows - 1) / rows);
  for (int block = 0; block < load.blocks; ++block) {
    const int64_t tiles = tiles_of(x, turn_of(x, block, rows), rows, tile);
    const int64_t until = busy.top() + tiles;
    busy.pop();
    busy.push(until);
    load.all += tiles;
    load.busiest = std::max(load.busiest, until);
  }
  return load;
}

/// Each multiprocessor holds one block, whose turns are known from the start.
inline Load load_of_persistent(const attention::Shape& x, int rows, int tile) {
  Load load;
  load.blocks = std::min(kMultiprocessors, x.turns(rows));
  for (int block = 0; block < load.blocks; ++block) {
    int64_t own = 0;
    for (int round = 0;; ++round) {
      const int number = x.number_of_turn(round, block, static_cast<int>(load.blocks));
      if (number >= x.turns(rows)) break;
      own += tiles_of(x, x.turn(number, rows), rows, tile);
    }
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
