#pragma once

#include "warps.h"

/// What both passes backward share: a block keeps rows of two tensors, tiles of two others pass by.
namespace usp::attention {

inline constexpr int kStep = 32;  ///< rows that pass by at a time

/// Shared memory of a block: its rows, stages of tiles and of what backward keeps of queries.
template <int width>
struct Pairs {
  using Row = Gradients<bf16>::Row;  ///< two numbers of a query, for the passes to come

  static constexpr int kOwn = kOwnRows * width * 2, kTile = kStep * width * 2;
  static constexpr int kStage = 2 * kTile + kStep * static_cast<int>(sizeof(Row));
  static constexpr int kBytes = 2 * (kOwn + kStage);

  char* shared;

  /// Of one tensor, 0 or 1: the block's rows, and those that pass by.
  __device__ char* own(int tensor) const { return shared + tensor * kOwn; }
  __device__ char* tile(int step, int tensor) const {
    return shared + 2 * kOwn + step % 2 * kStage + tensor * kTile;
  }
  /// Of the queries that pass by, where these are queries.
  __device__ Row* rows(int step) const { return reinterpret_cast<Row*>(tile(step, 2)); }

  /// The block's rows: those of x and y from `first` on, zeros from `end` on.
  __device__ void bring_own(const bf16* x, const bf16* y, int pitch, int first, int end) const {
    bring<width, kOwnRows>(own(0), x, pitch, first, end);
    bring<width, kOwnRows>(own(1), y, pitch, first, end);
  }
  /// The same for a step.
  __device__ void bring_tiles(int step, const bf16* x, const bf16* y, int pitch, int first,
                              int end) const {
    bring<width, kStep>(tile(step, 0), x, pitch, first, end);
    bring<width, kStep>(tile(step, 1), y, pitch, first, end);
  }

  /// s, ds = the warp's rows of one tensor times the tile of one, and of the other: scores, and
  /// the gradients of weights.
  __device__ void multiply_both(float (&s)[kStep / 2], float (&ds)[kStep / 2], int step) const {
    multiply<width>(s, own(0), tile(step, 0));
    multiply<width>(ds, own(1), tile(step, 1));
  }
};

/// What backward keeps of a row of a head, for its warp to write.
__device__ inline Gradients<bf16>::Row keep(const Gradients<bf16>& g, int index, int row) {
  const Problem<bf16>& p = g.of;
  const Head<bf16> head(p, index);
  Gradients<bf16>::Row kept{INFINITY, 0, p.seen_by(head.sample, row)};
  if (row >= p.queries) return kept;
  const int64_t at = head.out - p.out + int64_t{row} * head.pitch;
  for (int x = cuda::lane() * 2; x < p.width; x += 2 * cuda::kWarp) {
    const auto dout = cuda::load_pack<2>(g.dout + at + x), out = cuda::load_pack<2>(p.out + at + x);
    kept.delta += dout[0] * out[0] + dout[1] * out[1];
  }
  kept.delta = cuda::warp_sum(kept.delta);
  const float lse = head.lse[row];
  kept.lse = lse == -INFINITY ? INFINITY : lse * kLog2e;
  return kept;
}

// [weigh]
/// A score becomes a weight again, and the gradient of a weight becomes the gradient of the score,
/// not yet times the problem's scale. `scale` is that one times log2(e).
__device__ inline void weigh(float& s, float& ds, const Gradients<bf16>::Row& row, float scale) {
  s = cuda::fast_exp2(fmaf(s, scale, -row.lse));
  ds = s * (ds - row.delta);
}
// [weigh]

}  // namespace usp::attention
