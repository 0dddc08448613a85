#pragma once

#include "cuda/reduce.h"
#include "rung.h"

/// What the rungs without tensor cores share. A block has 32 queries, four for each of eight warps.
/// For scores a lane has one of 32 keys; for outputs it has the channels lane, lane + 32, ...
namespace usp::attention {

inline constexpr int kTile = 32, kRows = 4, kBlock = 256, kWarps = kTile / kRows;
/// From a row to the next in shared memory: an odd number, so that a channel of 32 rows lies in 32
/// banks.
template <int width>
inline constexpr int kStride = width + 1;
/// Elements of a tile.
template <int width>
inline constexpr int kElements = kTile* kStride<width>;

/// Row of the block that is the first of this warp's.
__device__ inline int first_row() { return cuda::warp() * kRows; }

/// to = 32 rows of x from `first` on; zeros from row `end` on.
template <int width>
__device__ void bring(float* to, const float* x, int pitch, int first, int end) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * width; i += kBlock) {
    const int row = first + i / width;
    to[i / width * kStride<width> + i % width] =
        row < end ? x[int64_t{row} * pitch + i % width] : 0;
  }
}

/// score[r] = the warp's row r of the queries times this lane's key.
template <int width>
__device__ void multiply(float (&score)[kRows], const float* queries, const float* keys) {
  const float* const rows = queries + first_row() * kStride<width>;
  const float* const key = keys + cuda::lane() * kStride<width>;
  for (int r = 0; r < kRows; ++r) score[r] = 0;
  for (int d = 0; d < width; ++d) {
    const float x = key[d];
    for (int r = 0; r < kRows; ++r) score[r] += rows[r * kStride<width> + d] * x;
  }
}

/// result[r][c] += the values, weighted by weights [kRows, kTile], at channel lane + 32 c.
template <int width>
__device__ void add_weighted(float (&result)[kRows][width / kTile], const float* weights,
                             const float* values) {
  for (int key = 0; key < kTile; ++key) {
    for (int c = 0; c < width / kTile; ++c) {
      const float x = values[key * kStride<width> + cuda::lane() + c * kTile];
      for (int r = 0; r < kRows; ++r) result[r][c] += weights[r * kTile + key] * x;
    }
  }
}

/// A warp's rows, of which some keys have been seen: result / sum is their output so far.
template <int width>
struct Rows {
  Stretch seen[kRows];
  float max[kRows], sum[kRows];  // the sum is that of this lane's keys
  float result[kRows][width / kTile];

  /// Rows from `row` on, before the first key.
  __device__ Rows(const Shape& p, int sample, int row) {
    for (int r = 0; r < kRows; ++r) {
      seen[r] = p.seen_by(sample, row + r);
      max[r] = -cuda::kInfinity<float>;
      sum[r] = 0;
      for (int c = 0; c < width / kTile; ++c) result[r][c] = 0;
    }
  }

  // [take]
  /// The keys of a tile, from number `first` on. What was summed so far was relative to the old
  /// maximum, and is multiplied by exp(old - new): sum and result alike.
  __device__ void take(float scale, const float* queries, const float* keys, const float* values,
                       float* weights, int first) {
    float score[kRows];
    multiply<width>(score, queries, keys);
    const int key = first + cuda::lane();
    for (int r = 0; r < kRows; ++r) {
      const bool visible = seen[r].holds(key, key + 1);
      const float s = visible ? score[r] * scale : -cuda::kInfinity<float>;
      const float new_max = cuda::Larger<float>()(max[r], cuda::warp_max(s));
      const float shift = cuda::SoftmaxSum<float>::shift(new_max);
      const float factor = std::exp(max[r] - shift), weight = std::exp(s - shift);
      max[r] = new_max;
      sum[r] = sum[r] * factor + weight;
      for (int c = 0; c < width / kTile; ++c) result[r][c] *= factor;
      weights[r * kTile + cuda::lane()] = weight;
    }
    __syncwarp();
    add_weighted<width>(result, weights, values);
  }
  // [take]

  /// Row `row` of the head and those behind it: divides by the sum.
  __device__ void finish(const Head<float>& head, int row, int end) {
    for (int r = 0; r < kRows; ++r) {
      const float total = cuda::warp_sum(sum[r]), inverse = total == 0 ? 0 : 1 / total;
      if (row + r >= end) continue;
      if (cuda::lane() == 0) head.lse[row + r] = max[r] + std::log(total);
      float* const out = head.out + int64_t{row + r} * head.out_pitch + cuda::lane();
      for (int c = 0; c < width / kTile; ++c) out[c * kTile] = result[r][c] * inverse;
    }
  }
};

}  // namespace usp::attention
