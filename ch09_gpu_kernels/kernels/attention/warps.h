#pragma once

#include "cuda/reduce.h"
#include "fragments.h"

/// What the rungs on products of a warp share. A block keeps 128 rows, 16 for each of eight warps,
/// and tiles of fewer rows pass by. Tiles lie in panels of 64 channels.
namespace usp::attention {

inline constexpr int kOwnRows = 128, kEightWarps = 256, kWarpRows = 16;

/// to = `rows` rows of x from `first` on; zeros from row `end` on.
template <int width, int rows, int threads = kEightWarps>
__device__ void bring(char* to, const bf16* x, int pitch, int first, int end) {
  for (int panel = 0; panel < width / kDepth; ++panel) {
    ladder::bring_rows<rows, threads>(to + panel * rows * kRowBytes, x, pitch, first, end,
                                      panel * kDepth, width);
  }
}

/// s = the warp's 16 rows, of the `own_rows` of its block, times 2 * registers rows of the tile
/// that passes by.
template <int width, int own_rows = kOwnRows, int registers>
__device__ void multiply(float (&s)[registers], const char* rows, const char* tile) {
  const int lane = cuda::lane();
  USP_UNROLL
  for (int i = 0; i < registers; ++i) s[i] = 0;
  USP_UNROLL
  for (int l = 0; l < width / 8; l += 2) {
    uint32_t a[4];
    cuda::ldmatrix_x4(a, rows + l / 8 * own_rows * kRowBytes +
                             place(cuda::warp() * kWarpRows + lane % 16, l % 8 + lane / 16));
    USP_UNROLL
    for (int j = 0; j < registers / 8; ++j) {
      uint32_t b[4];
      cuda::ldmatrix_x4(b, tile + l / 8 * 2 * registers * kRowBytes +
                               place(j * 16 + lane / 16 * 8 + lane % 8, l % 8 + lane / 8 % 2));
      cuda::mma_m16n8k16(fragment(s, 2 * j), a, {b[0], b[1]});
      cuda::mma_m16n8k16(fragment(s, 2 * j + 1), a, {b[2], b[3]});
    }
  }
}

/// o += weights times the tile's rows, of which ldmatrix turns 8 x 8 at a time.
template <int channels, int registers>
__device__ void add_weighted(float (&o)[channels], const float (&weights)[registers],
                             const char* tile) {
  const int lane = cuda::lane();
  USP_UNROLL
  for (int l = 0; l < registers / 8; ++l) {
    uint32_t a[4];
    pack(a, weights, l);
    USP_UNROLL
    for (int j = 0; j < channels / 8; ++j) {
      uint32_t b[4];
      cuda::ldmatrix_x4_trans(b, tile + j / 4 * 2 * registers * kRowBytes +
                                     place(l * 16 + lane % 16, j % 4 * 2 + lane / 16));
      cuda::mma_m16n8k16(fragment(o, 2 * j), a, {b[0], b[1]});
      cuda::mma_m16n8k16(fragment(o, 2 * j + 1), a, {b[2], b[3]});
    }
  }
}

}  // namespace usp::attention
