#pragma once

#include "../matmul/swizzled.h"
#include "rung.h"

/// What the rungs for tensor cores share. Of scores and outputs a thread has two rows, 8 apart:
/// register i belongs to row i / 2 % 2, and to column i / 4 * 8 + i % 2 from the thread's first one
/// on. Four threads side by side have the same rows.
namespace usp::attention {

using ladder::kDepth;
using ladder::kRowBytes;
using ladder::place;

inline constexpr float kLog2e = 1.44269504f;

/// The registers of columns 8 * tile to 8 * tile + 7, as a product of a warp takes them.
template <int registers>
__device__ float (&fragment(float (&d)[registers], int tile))[4] {
  return *reinterpret_cast<float(*)[4]>(d + tile * 4);
}

/// 2^x by the unit for special functions, of which a multiprocessor has few.
struct UnitExp2 {
  __device__ float operator()(float x, int) const { return cuda::fast_exp2(x); }
};

/// The larger of the four threads' numbers.
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(cuda::kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(cuda::kAllLanes, x, 2));
}
/// Their sum.
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(cuda::kAllLanes, x, 1);
  return x + __shfl_xor_sync(cuda::kAllLanes, x, 2);
}

/// Scores of keys that a row does not see become -inf. `key` is that of register 0.
template <int registers>
__device__ void mask(float (&s)[registers], int key, const Stretch (&seen)[2]) {
  USP_UNROLL
  for (int i = 0; i < registers; ++i) {
    const int own = key + i / 4 * 8 + i % 2;
    if (!seen[i / 2 % 2].holds(own, own + 1)) s[i] = -INFINITY;
  }
}

/// Softmax of two rows that arrive tile by tile.
struct OnlineSoftmax {
  float base[2] = {-INFINITY, -INFINITY};  ///< what weights are relative to: the largest score
  float sum[2] = {0, 0};                   ///< of this thread's weights
  float factor[2] = {1, 1};                ///< what summed outputs are to be multiplied by

  /// s: scores become weights, 2^(scale s - scale base). `scale` includes log2(e).
  template <int registers, class Exp2 = UnitExp2>
  __device__ void take(float (&s)[registers], float scale, const Exp2& exp2 = {}) {
    float largest[2] = {base[0], base[1]};
    USP_UNROLL
    for (int i = 0; i < registers; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
    USP_UNROLL
    for (int half = 0; half < 2; ++half) move(half, row_max(largest[half]), scale);
    sum_weights(s, scale, exp2);
  }

  /// Scores become weights, which are summed.
  template <int registers, class Exp2>
  __device__ void sum_weights(float (&s)[registers], float scale, const Exp2& exp2) {
    const float shift[2] = {shift_of(base[0]) * scale, shift_of(base[1]) * scale};
    USP_UNROLL
    for (int i = 0; i < registers; ++i) {
      s[i] = exp2(fmaf(s[i], scale, -shift[i / 2 % 2]), i);
      sum[i / 2 % 2] += s[i];
    }
  }

  /// A new base, and what this does to all that was summed.
  __device__ void move(int half, float to, float scale) {
    factor[half] = cuda::fast_exp2((base[half] - shift_of(to)) * scale);
    base[half] = to;
    sum[half] *= factor[half];
  }

  /// -inf - -inf would be NaN.
  __device__ static float shift_of(float base) { return base == -INFINITY ? 0 : base; }
};

/// The weights of 16 keys, as the product with values takes them: no thread needs another's.
template <int registers>
__device__ void pack(uint32_t (&to)[4], const float (&weights)[registers], int step) {
  USP_UNROLL
  for (int j = 0; j < 4; ++j) {
    to[j] = cuda::pack_bf16(weights[step * 8 + j * 2], weights[step * 8 + j * 2 + 1]);
  }
}

/// put(where, number, its neighbor) for all pairs of columns of two rows, each multiplied by its
/// factor; `row` is the thread's first one.
template <class T, int registers, class Put>
__device__ void each_pair(T* to, int pitch, int row, int end, const float (&o)[registers],
                          const float (&factor)[2], const Put& put) {
  USP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int y = row + half * 8;
    if (y >= end) continue;
    T* const at = to + int64_t{y} * pitch + static_cast<int>(threadIdx.x) % 4 * 2;
    USP_UNROLL
    for (int i = half * 2; i < registers; i += 4) {
      put(at + i / 4 * 8, o[i] * factor[half], o[i + 1] * factor[half]);
    }
  }
}

/// They leave in bf16.
template <int registers>
__device__ void store_rows(bf16* to, int pitch, int row, int end, const float (&o)[registers],
                           const float (&factor)[2]) {
  each_pair(to, pitch, row, end, o, factor, [](bf16* at, float x, float y) {
    *reinterpret_cast<uint32_t*>(at) = cuda::pack_bf16(x, y);
  });
}
/// They leave as they are, and are added to what is there if `adds`.
template <int registers>
__device__ void store_rows(float* to, int pitch, int row, int end, const float (&o)[registers],
                           const float (&factor)[2], bool adds) {
  each_pair(to, pitch, row, end, o, factor, [adds](float* at, float x, float y) {
    cuda::Numbers<float, 2> pair{{x, y}};
    if (adds) {
      const auto before = cuda::load_pack<2>(at);
      pair[0] += before[0], pair[1] += before[1];
    }
    cuda::store_pack<2>(at, pair);
  });
}

/// Outputs are divided by the sums and leave, with each row's lse, as far as there are rows. `row`
/// is the thread's first.
template <int registers>
__device__ void finish(const Problem<bf16>& p, const Head<bf16>& head, int row, int end,
                       const OnlineSoftmax& softmax, const float (&o)[registers]) {
  float inverse[2];
  USP_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float sum = row_sum(softmax.sum[half]);
    const int y = row + half * 8;
    inverse[half] = softmax.base[half] == -INFINITY ? 0 : 1 / sum;
    if (y < end && threadIdx.x % 4 == 0) {
      head.lse[y] = softmax.base[half] * p.scale + logf(sum);
    }
  }
  if (head.wide_out == nullptr) {
    store_rows(head.out, head.out_pitch, row, end, o, inverse);
  } else {
    store_rows(head.wide_out, head.out_pitch, row, end, o, inverse, /*adds=*/false);
  }
}

/// Zeros in `channels` channels of outputs, or of values' gradients, behind those of a head, as far
/// as there are rows: where they lie as far apart as keys do.
template <int channels, class T>
__device__ void store_zeros(T* to, int pitch, int row, int end) {
  constexpr float kNone[channels / 2] = {}, kOnce[2] = {1, 1};
  if constexpr (sizeof(T) == sizeof(bf16)) store_rows(to, pitch, row, end, kNone, kOnce);
  if constexpr (sizeof(T) != sizeof(bf16)) {
    store_rows(to, pitch, row, end, kNone, kOnce, /*adds=*/false);
  }
}
/// The same behind each head's outputs, where there is a gap of so many.
template <int channels>
__device__ void pad(const Problem<bf16>& p, const Head<bf16>& head, int row) {
  const int width = p.value_width();
  if (p.of_out.head == width) return;
  if (head.wide_out == nullptr) {
    store_zeros<channels>(head.out + width, head.out_pitch, row, p.queries);
  } else {
    store_zeros<channels>(head.wide_out + width, head.out_pitch, row, p.queries);
  }
}

/// Cost of rungs that keep `queries` queries a block, in which `warps` warps look up its tiles, and
/// each of eight where the documents of 16 rows begin and what all of them see. Each output is
/// written by half a sector.
inline Cost cost_of(const Shape& x, int queries, int keys, int warps) {
  const int64_t down = x.samples * ceil_div(x.queries, queries);
  const auto [tiles, blocks] = count_tiles(x, queries, keys);
  const int64_t rows = int64_t{x.samples} * x.queries;
  const int64_t key = int64_t{x.width} * int64_t{sizeof(bf16)};  // and a query
  const int64_t value = int64_t{x.value_width()} * int64_t{sizeof(bf16)};
  const int64_t of_eight = x.queries % 8 == 0 ? kSector : 2 * kSector;  // lse, begins
  const int64_t eights = x.samples * ceil_div(x.queries, 8) * of_eight;
  const int64_t reads = warps * stretches_of(x, x.query_at, x.queries, queries) + 8 * down;
  const int64_t head = blocks * queries * key + tiles * keys * (key + value) + 2 * rows * value +
                       eights + bytes_of_begins(x, reads) + (x.begins == nullptr ? 0 : eights);
  return {x.heads * head, x.heads * 2 * tiles * queries * keys * (x.width + x.value_width()),
          x.heads * down};
}

}  // namespace usp::attention
