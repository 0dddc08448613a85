#pragma once

#include "rung.h"

/// What the rungs for tensor cores share: tiles of 64 columns in rows of 128 bytes, pieces of 16 of
/// which change places, and how accumulators leave.
namespace usp::ladder {

inline constexpr int kDepth = 64, kRowBytes = 128;

/// k as it is multiplied: filled up with zeros.
inline int64_t full_depth(int64_t k) { return ceil_div(k, kDepth) * kDepth; }

/// Where 16 bytes of a row are: eight rows of one piece lie in all banks.
__device__ inline int place(int row, int piece) { return row * kRowBytes + (piece ^ row % 8) * 16; }

/// Rows of x from `first` on, columns from `from` on, by cp.async: zeros beyond both.
template <int count, int threads>
__device__ void bring_rows(char* to, const bf16* x, int pitch, int first, int rows, int from,
                           int k) {
  for (int i = static_cast<int>(threadIdx.x); i < count * 8; i += threads) {
    const int row = first + i / 8, column = from + i % 8 * 8;
    const int bytes = row < rows ? max(0, min(8, k - column)) * 2 : 0;
    cuda::cp_async_16(to + place(i / 8, i % 8), bytes > 0 ? x + int64_t{row} * pitch + column : x,
                      bytes);
  }
}

/// Two columns of a row of c, but for what lies outside.
__device__ inline void store_two(const Product<bf16>& p, int row, int column, float x, float y) {
  if (row >= p.m || column >= p.n) return;
  bf16* const to = p.c + int64_t{row} * p.c_pitch + column;
  if (column + 1 < p.n) {
    *reinterpret_cast<uint32_t*>(to) = cuda::pack_bf16(x, y);
  } else {
    *to = __float2bfloat16(x);
  }
}

/// The accumulators of a warpgroup, whose tile begins at this row and column.
template <int registers>
__device__ void store_group(const Product<bf16>& p, int top, int left, float (&d)[registers]) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int row = top + cuda::wgmma_row(thread), column = left + cuda::wgmma_column(thread);
  USP_UNROLL
  for (int i = 0; i < registers; i += 2) {
    store_two(p, row + i / 2 % 2 * 8, column + i / 4 * 8, d[i], d[i + 1]);
  }
}

/// A step of a warpgroup, not waited for: 64 rows of one tile by 2 * registers of another.
template <int registers>
__device__ void multiply(float (&d)[registers], const char* left, const char* right, bool add) {
  cuda::wgmma_fence(d);
  USP_UNROLL
  for (int i = 0; i < kDepth / 16; ++i) {
    cuda::wgmma(d, cuda::descriptor(left + i * 32, cuda::Swizzle::bytes128, 0, 1024),
                cuda::descriptor(right + i * 32, cuda::Swizzle::bytes128, 0, 1024), add || i > 0);
  }
  cuda::wgmma_commit();
}

/// The map of a matrix that is copied in boxes of `box_rows` rows.
inline const CUtensorMap& map_of(const Product<bf16>& p, const bf16* x, int rows, int columns,
                                 int pitch, int box_rows) {
  return p.maps->of({x, cuda::tensor_map_type(x), rows, columns, pitch, box_rows, kDepth});
}

}  // namespace usp::ladder
