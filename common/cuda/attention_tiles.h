#pragma once

#include "cuda/hopper.h"
#include "cuda/kernels.h"
#include "cuda/reduce.h"

/// What the kernels of blockwise attention share. Each block of threads has kBlockRows rows of one
/// head (queries, or keys where these get gradients) and meets the rows of the other side in tiles
/// of 32. A warp has kRows of the block's rows, which makes two kinds of product:
///
/// - row by tile row: a lane has one row of the tile and multiplies it by all of the warp's rows;
/// - weights by tile: a lane has the channels lane, lane + 32, ... of the results, in registers.
///
/// Rows lie in shared memory in the type of the sums, an odd number of elements apart: so 32 lanes
/// that read one channel of 32 rows meet 32 different banks.
namespace usp::cuda {

inline constexpr int kTile = kWarp;
inline constexpr int kRows = 4;
inline constexpr int kBlockWarps = 4;
inline constexpr int kBlockRows = kRows * kBlockWarps;
/// Positions of rows that are not there: no query sees the key, the query sees no key.
inline constexpr int64_t kNever = int64_t{1} << 62, kBeforeAll = -1;

/// From one row to the next in shared memory.
constexpr int row_stride(int64_t D) { return static_cast<int>(D) | 1; }

/// run(C) with the channels that a lane has for head size D.
template <class Run>
void with_channels(int64_t D, const Run& run) {
  if (D <= 2 * kWarp) return run(std::integral_constant<int, 2>{});
  if (D <= 4 * kWarp) return run(std::integral_constant<int, 4>{});
  return run(std::integral_constant<int, kMaxHeadDim / kWarp>{});
}

/// The position of a row, or `otherwise` where there is no such row.
__device__ inline int64_t position_of(const Positions& positions, int64_t row, int64_t otherwise) {
  return row < positions.count() ? positions[row] : otherwise;
}

/// The positions from `from` to `to`, both included: of the keys that a query sees.
struct Window {
  int64_t from, to;

  __device__ bool holds(int64_t position) const { return from <= position && position <= to; }
};

/// What query `row` of sample b sees; nothing if there is no such row. Reads 4 bytes where there
/// are documents.
template <class T>
__device__ Window window_of(const AttentionProblem<T>& p, int64_t b, int64_t row) {
  if (row >= p.S) return {kNever, kBeforeAll};
  return {p.begins == nullptr ? 0 : p.begins[b * p.S + row], p.queries[row]};
}

/// What any query of a block of rows that begins at `first` may see; for every lane.
template <class T>
__device__ Window window_of_block(const AttentionProblem<T>& p, int64_t b, int64_t first) {
  const Window mine = window_of(p, b, lane() < kBlockRows ? first + lane() : p.S);
  return {-warp_max(-mine.from), warp_max(mine.to)};
}

/// Whether none of the keys, one a lane, lies in the window.
__device__ inline bool sees_none(const Window& window, int64_t key) {
  if (-warp_max(-key) > window.to) return true;
  return window.from > 0 && warp_max(key == kNever ? kBeforeAll : key) < window.from;
}

/// to [count, stride] = `count` rows of head (b, n) of x from `first` on; zeros from row `end` on.
/// A warp a row, neighboring lanes on neighboring channels.
template <class T>
__device__ void load_rows(accumulate_t<T>* to, int count, const Heads<const T>& x, int64_t b,
                          int64_t n, int64_t first, int64_t end, int D) {
  for (int row = warp(); row < count; row += kBlockWarps) {
    const bool there = first + row < end;
    const T* from = x.at(b, there ? first + row : 0, n);
    for (int d = lane(); d < D; d += kWarp) {
      to[row * row_stride(D) + d] = there ? load(from[d]) : accumulate_t<T>{0};
    }
  }
}

/// products[r] = row r of the warp's rows times this lane's row of the tile.
template <class A>
__device__ void multiply_rows(A (&products)[kRows], const A* rows, const A* tile, int D) {
  const A* own = tile + lane() * row_stride(D);
  for (int r = 0; r < kRows; ++r) products[r] = 0;
  for (int d = 0; d < D; ++d) {
    const A element = own[d];
    for (int r = 0; r < kRows; ++r) products[r] += rows[r * row_stride(D) + d] * element;
  }
}

/// sums[r][c] += the tile's rows, weighted by weights [kTile, kRows], at this lane's channel c.
template <int C, class A>
__device__ void add_weighted(A (&sums)[kRows][C], const A* weights, const A* tile, int D) {
  for (int t = 0; t < kTile; ++t) {
    for (int c = 0; c < C; ++c) {
      const int d = lane() + c * kWarp;
      if (d >= D) continue;
      const A element = tile[t * row_stride(D) + d];
      for (int r = 0; r < kRows; ++r) sums[r][c] += weights[t * kRows + r] * element;
    }
  }
}

/// Rows `first` and after of head (b, n) of x, which has `rows` = sums, at this lane's channels, or
/// += if it `adds`. The compiler unrolls these loops and keeps the sums in registers: one call a
/// tensor is small enough for that (the build refuses kernels whose sums lie in memory).
template <int C, class O, class A>
__device__ void leave_rows(const Heads<O>& x, int64_t b, int64_t first, int64_t rows, int64_t n,
                           const A (&sums)[kRows][C], int D, bool adds) {
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= rows) continue;
    O* const to = x.at(b, first + r, n);
    for (int c = 0; c < C; ++c) {
      const int d = lane() + c * kWarp;
      if (d < D) store(to[d], adds ? load(to[d]) + sums[r][c] : sums[r][c]);
    }
  }
}

}  // namespace usp::cuda
