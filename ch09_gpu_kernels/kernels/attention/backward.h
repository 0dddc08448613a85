#pragma once

#include <algorithm>

#include "warps.h"

/// What both passes backward share: a block keeps rows of two tensors, tiles of two others pass by.
namespace usp::attention {

/// Rows that pass by at a time: fewer where a thread has registers for no more scores.
__host__ __device__ constexpr int step_of(int width) { return width > kWidestValues ? 16 : 32; }

/// Rows of a head, and how far apart they are.
struct Source {
  const bf16* rows;
  int pitch;
};

/// Rows of the outputs' gradient.
__device__ inline Source dout_of(const Gradients<bf16>& g, const Head<bf16>& head) {
  return {head_of(g.dout, g.of_dout, head.sample, head.number), g.of_dout.row};
}

/// Shared memory of a block: its rows, stages of tiles and of what backward keeps of queries. The
/// second tensor of each pair, values and the outputs' gradient, may be narrower.
template <int width, int value_width>
struct Pairs {
  using Row = Gradients<bf16>::Row;  ///< two numbers of a query, for the passes to come

  static constexpr int kStep = step_of(width), kTile = kStep * width * 2;
  static constexpr int kChannels = width + value_width;
  static constexpr int kStage = kStep * (kChannels * 2 + static_cast<int>(sizeof(Row)));
  static constexpr int kOwn = kOwnRows * kChannels * 2, kBytes = kOwn + 2 * kStage;

  char* shared;

  /// Rows of one tensor, 0 or 1: the block's own, and those that pass by.
  __device__ char* own(int tensor) const { return shared + tensor * kOwnRows * width * 2; }
  __device__ char* tile(int step, int tensor) const {
    return shared + kOwn + step % 2 * kStage + tensor * kTile;
  }
  /// Numbers kept of the rows that pass by, where these are queries.
  __device__ Row* rows(int step) const {
    return reinterpret_cast<Row*>(tile(step, 0) + kStep * kChannels * 2);
  }

  /// The block's rows: those of x and y from `first` on, zeros from `end` on.
  __device__ void bring_own(const Source& x, const Source& y, int first, int end) const {
    bring<width, kOwnRows>(own(0), x.rows, x.pitch, first, end);
    bring<value_width, kOwnRows>(own(1), y.rows, y.pitch, first, end);
  }
  /// The same for a step.
  __device__ void bring_tiles(int step, const Source& x, const Source& y, int first,
                              int end) const {
    bring<width, kStep>(tile(step, 0), x.rows, x.pitch, first, end);
    bring<value_width, kStep>(tile(step, 1), y.rows, y.pitch, first, end);
  }

  /// s = the warp's rows of the first tensor times the tile of it: scores.
  __device__ void multiply_first(float (&s)[kStep / 2], int step) const {
    multiply<width>(s, own(0), tile(step, 0));
  }
  /// The same of the second tensor: gradients of weights.
  __device__ void multiply_second(float (&ds)[kStep / 2], int step) const {
    multiply<value_width>(ds, own(1), tile(step, 1));
  }
};

/// What backward keeps of a row of a head, for its warp to write.
__device__ inline Gradients<bf16>::Row keep(const Gradients<bf16>& g, int index, int row) {
  const Problem<bf16>& p = g.of;
  const Head<bf16> head(p, index);
  Gradients<bf16>::Row kept{INFINITY, 0, p.seen_by(head.sample, row)};
  if (row >= p.queries) return kept;
  if (g.delta != nullptr) {
    kept.delta = g.delta[int64_t{index} * p.queries + row];
  } else {
    const Source dout = dout_of(g, head);
    const bf16* const x = dout.rows + int64_t{row} * dout.pitch;
    const bf16* const y = head.out + int64_t{row} * head.out_pitch;
    for (int at = cuda::lane() * 2; at < p.value_width(); at += 2 * cuda::kWarp) {
      const auto a = cuda::load_pack<2>(x + at), b = cuda::load_pack<2>(y + at);
      kept.delta += a[0] * b[0] + a[1] * b[1];
    }
    kept.delta = cuda::warp_sum(kept.delta);
  }
  const float lse = head.lse[row];
  kept.lse = lse == -INFINITY ? INFINITY : lse * kLog2e;
  return kept;
}

/// A gradient's rows of a head leave: to `to`, or to `sums` if there are any, and these may have to
/// be added to (`adds`). Multiplied by `factor`.
template <int registers>
__device__ void leave(bf16* to, float* sums, bool adds, const Pitch& pitch, int sample, int head,
                      int row, int end, const float (&gradient)[registers], float factor) {
  const float factors[2] = {factor, factor};
  if (sums == nullptr) {
    store_rows(head_of(to, pitch, sample, head), pitch.row, row, end, gradient, factors);
  } else {
    store_rows(head_of(sums, pitch, sample, head), pitch.row, row, end, gradient, factors, adds);
  }
}

/// Zeros behind the gradients of a head's values, where there is a gap of so many channels and
/// nothing to add to.
template <int channels>
__device__ void pad(const Gradients<bf16>& g, const Head<bf16>& head, int row) {
  const Pitch& pitch = g.of_dv;
  const int width = g.of.value_width(), end = g.of.keys;
  if (pitch.head == width) return;
  if (g.dv_sums == nullptr) {
    store_zeros<channels>(head_of(g.dv, pitch, head.sample, head.kv) + width, pitch.row, row, end);
  } else if (!g.adds) {
    store_zeros<channels>(head_of(g.dv_sums, pitch, head.sample, head.kv) + width, pitch.row, row,
                          end);
  }
}

// [weigh]
/// A score becomes a weight again. `scale` is the problem's times log2(e).
__device__ inline float weight_of(float s, const Gradients<bf16>::Row& row, float scale) {
  return cuda::fast_exp2(fmaf(s, scale, -row.lse));
}
/// The gradient of a weight becomes that of its score, not yet times the problem's scale.
__device__ inline float dscore_of(float ds, float weight, const Gradients<bf16>::Row& row) {
  return weight * (ds - row.delta);
}
// [weigh]

/// A score and the gradient of its weight become that weight and the score's gradient.
__device__ inline void weigh(float& s, float& ds, const Gradients<bf16>::Row& row, float scale) {
  s = weight_of(s, row, scale);
  ds = dscore_of(ds, s, row);
}

/// rows: what backward keeps of every query, a warp a row.
void keep_rows(const cuda::Queue& queue, const Gradients<bf16>& g);

/// Cost of both passes in tiles of kOwnRows by `step` rows, in which `warps` warps of a block look
/// up its tiles. Each gradient is written by half a sector, as outputs are. Where documents begin
/// is read for each row, each look-up of tiles, and what all rows of each of eight warps see;
/// searches among queries add up.
inline Cost cost_of_backward(const Shape& x, int step, int warps) {
  const int64_t row = x.width * int64_t{sizeof(bf16)}, of_row = sizeof(Gradients<bf16>::Row);
  const int64_t value = x.value_width() * int64_t{sizeof(bf16)}, both = row + value;
  const int64_t down = x.samples * ceil_div(x.queries, kOwnRows);
  const int64_t across = ceil_div(x.keys, kOwnRows), rows = int64_t{x.samples} * x.queries;
  const Count seen = count_tiles(x, kOwnRows, step);
  const Count seeing = count_tiles_of_keys(x, kOwnRows, step);
  const int64_t searches = warps * stretches_of(x, x.key_at, x.keys, kOwnRows) * x.search_steps();
  const int64_t reads = rows + warps * stretches_of(x, x.query_at, x.queries, kOwnRows) + 8 * down;
  const int64_t of_rows =
      rows * (2 * value + kSector) + x.samples * Gradients<bf16>::rows_of(x.queries) * kSector;
  const int64_t of_keys = seeing.blocks * kOwnRows * both + 2 * x.samples * x.keys * both +
                          bytes_of_begins(x, searches);
  const int64_t of_queries =
      (seen.blocks * both + down * of_row) * kOwnRows + rows * 2 * row + bytes_of_begins(x, reads);
  const int64_t passing = step * (seeing.tiles * (both + of_row) + seen.tiles * both);
  const int64_t channels = x.width + x.value_width();
  const int64_t products = 2 * channels * seeing.tiles + (channels + x.width) * seen.tiles;
  return {x.heads * (of_rows + of_queries + passing) + x.kv_heads * of_keys,
          x.heads * 2 * kOwnRows * step * products,
          std::min(x.heads * down, x.kv_heads * x.samples * across)};
}

}  // namespace usp::attention
