#include "kernels.h"

/// One warp brings tiles by TMA, four multiply them by mma.sync.
namespace usp::hopper {
namespace {

using namespace usp::cuda;

constexpr int kTile = 64, kDepth = 64, kStages = 2, kWarps = 4, kThreads = 32 * (kWarps + 1);
constexpr int kOperandBytes = kTile * kDepth * 2, kStageBytes = 2 * kOperandBytes;
constexpr int kBarriersAt = kStages * kStageBytes, kSharedBytes = kBarriersAt + 2 * kStages * 8;

template <bool swizzled>
__global__ void __launch_bounds__(kThreads)
    tma_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               float* c, int m, int n, int k, int c_pitch) {
  char* const shared = swizzled_shared();
  Barrier* const full = reinterpret_cast<Barrier*>(shared + kBarriersAt);
  Barrier* const empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = (k + kDepth - 1) / kDepth;
  if (warp == kWarps) {
    if (lane == 0) {
      for (int step = 0; step < steps; ++step) {
        const int stage = step % kStages;
        empty[stage].wait((step / kStages & 1) ^ 1);
        full[stage].arrive_expect(kStageBytes);
        tma_load_2d(shared + stage * kStageBytes, &a, &full[stage], step * kDepth,
                    blockIdx.y * kTile);
        tma_load_2d(shared + stage * kStageBytes + kOperandBytes, &b, &full[stage], step * kDepth,
                    blockIdx.x * kTile);
      }
    }
    return;
  }
  const auto at = [](int row, int chunk) {
    return row * 128 + ((swizzled ? chunk ^ row % 8 : chunk) * 16);
  };
  float d[8][4] = {};
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages;
    const char* const left = shared + stage * kStageBytes;
    full[stage].wait(step / kStages & 1);
    USP_UNROLL
    for (int i = 0; i < kDepth / 16; ++i) {
      uint32_t x[4];
      ldmatrix_x4(x, left + at(warp * 16 + lane % 16, i * 2 + lane / 16));
      USP_UNROLL
      for (int j = 0; j < 4; ++j) {
        uint32_t y[4];
        ldmatrix_x4(
            y, left + kOperandBytes + at(j * 16 + lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2));
        const uint32_t first[2] = {y[0], y[1]}, second[2] = {y[2], y[3]};
        mma_m16n8k16(d[2 * j], x, first);
        mma_m16n8k16(d[2 * j + 1], x, second);
      }
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) empty[stage].arrive();
  }
  USP_UNROLL
  for (int j = 0; j < 8; ++j) {
    USP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int y = blockIdx.y * kTile + warp * 16 + lane / 4 + i / 2 * 8;
      const int x = blockIdx.x * kTile + j * 8 + lane % 4 * 2 + i % 2;
      if (y < m && x < n) c[static_cast<size_t>(y) * c_pitch + x] = d[j][i];
    }
  }
}

}  // namespace

void tma_product(const Product& x, bool swizzled) {
  TensorMaps maps;
  const auto how = swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  launch(swizzled ? tma_kernel<true> : tma_kernel<false>,
         {{ceil_div(x.n, kTile), ceil_div(x.m, kTile)}, kThreads, kSharedBytes}, nullptr,
         maps.of(boxed(x.a, x.m, x.k, x.pitch, kTile, kDepth, how)),
         maps.of(boxed(x.b, x.n, x.k, x.pitch, kTile, kDepth, how)), x.c, x.m, x.n, x.k, x.c_pitch);
}

}  // namespace usp::hopper
