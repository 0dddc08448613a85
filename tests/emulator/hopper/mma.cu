#include "kernels.h"

/// Four warps bring tiles by cp.async into two stages and multiply them by mma.sync. Pieces of 16
/// bytes change places within a row of 128, so that ldmatrix and cp.async meet no bank conflict.
namespace usp::hopper {
namespace {

using namespace usp::cuda;

constexpr int kTile = 64, kDepth = 64, kStages = 2, kThreads = 128;
constexpr int kOperandBytes = kTile * kDepth * 2, kStageBytes = 2 * kOperandBytes;

__device__ int place(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

/// Rows from `first` on, columns from k0 on, of x: zeros beyond `rows` and k.
__device__ void bring(char* to, const __nv_bfloat16* x, int first, int rows, int k0, int k,
                      int pitch) {
  for (int i = threadIdx.x; i < kTile * 8; i += kThreads) {
    const int row = first + i / 8, column = k0 + i % 8 * 8;
    const bool inside = row < rows && column < k;
    const __nv_bfloat16* from = inside ? x + static_cast<size_t>(row) * pitch + column : x;
    cp_async_16(to + place(i / 8, i % 8), from, inside ? min(8, k - column) * 2 : 0);
  }
}

__global__ void __launch_bounds__(kThreads)
    mma_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int m, int n, int k,
               int pitch, int c_pitch) {
  char* const shared = swizzled_shared();
  const int top = blockIdx.y * kTile, left = blockIdx.x * kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = (k + kDepth - 1) / kDepth;
  const auto bring_stage = [&](int step) {
    char* const stage = shared + step % kStages * kStageBytes;
    if (step < steps) {
      bring(stage, a, top, m, step * kDepth, k, pitch);
      bring(stage + kOperandBytes, b, left, n, step * kDepth, k, pitch);
    }
    cp_async_commit();
  };
  bring_stage(0);
  float d[8][4] = {};
  for (int step = 0; step < steps; ++step) {
    bring_stage(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    const char* const stage = shared + step % kStages * kStageBytes;
    USP_UNROLL
    for (int i = 0; i < kDepth / 16; ++i) {
      uint32_t x[4];
      ldmatrix_x4(x, stage + place(warp * 16 + lane % 16, i * 2 + lane / 16));
      USP_UNROLL
      for (int j = 0; j < 4; ++j) {
        uint32_t y[4];
        ldmatrix_x4(y, stage + kOperandBytes +
                           place(j * 16 + lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2));
        const uint32_t first[2] = {y[0], y[1]}, second[2] = {y[2], y[3]};
        mma_m16n8k16(d[2 * j], x, first);
        mma_m16n8k16(d[2 * j + 1], x, second);
      }
    }
    __syncthreads();
  }
  USP_UNROLL
  for (int j = 0; j < 8; ++j) {
    USP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int y = top + warp * 16 + lane / 4 + i / 2 * 8, x = left + j * 8 + lane % 4 * 2 + i % 2;
      if (y < m && x < n) c[static_cast<size_t>(y) * c_pitch + x] = d[j][i];
    }
  }
}

}  // namespace

void mma_product(const Product& x) {
  launch(mma_kernel,
         {{ceil_div(x.n, kTile), ceil_div(x.m, kTile)}, kThreads, kStages * kStageBytes}, nullptr,
         x.a, x.b, x.c, x.m, x.n, x.k, x.pitch, x.c_pitch);
}

}  // namespace usp::hopper
