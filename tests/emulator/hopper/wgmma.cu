#include "kernels.h"

/// Persistent: one warp brings tiles by TMA into a ring of stages, two warpgroups multiply them by
/// wgmma. Each block takes every gridDim.x-th tile of c.
namespace usp::hopper {
namespace {

using namespace usp::cuda;

constexpr int kTile = 128, kDepth = 64, kStages = 4, kConsumers = 2, kGroup = 128;
constexpr int kThreads = kGroup * (1 + kConsumers);
constexpr int kOperandBytes = kTile * kDepth * 2, kStageBytes = 2 * kOperandBytes;
constexpr int kRowBytes = 128;                                     // of 64 bf16: what is swizzled
constexpr int kOutColumns = 32, kOutBytes = 64 * kOutColumns * 4;  // of a box that is stored
constexpr int kOutBoxes = kTile / kOutColumns;
constexpr int kOutAt = kStages * kStageBytes;
constexpr int kBarriersAt = kOutAt + kConsumers * kOutBoxes * kOutBytes;
constexpr int kSharedBytes = kBarriersAt + 2 * kStages * 8;

/// Where the ring of stages is, and how often it went round.
struct Place {
  int stage = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <bool by_tma>
__global__ void __launch_bounds__(kThreads, 1)
    wgmma_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 const __grid_constant__ CUtensorMap out, float* c, int m, int n, int k,
                 int c_pitch) {
  char* const shared = swizzled_shared();
  Barrier* const full = reinterpret_cast<Barrier*>(shared + kBarriersAt);
  Barrier* const empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();

  const int columns = (n + kTile - 1) / kTile, tiles = (m + kTile - 1) / kTile * columns;
  const int steps = (k + kDepth - 1) / kDepth;
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  Place at;
  if (group == kConsumers) {
    fewer_registers<40>();
    if (thread == 0) {
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int step = 0; step < steps; ++step) {
          char* const stage = shared + at.stage * kStageBytes;
          empty[at.stage].wait(at.parity ^ 1);
          full[at.stage].arrive_expect(kStageBytes);
          tma_load_2d(stage, &a, &full[at.stage], step * kDepth, tile / columns * kTile);
          tma_load_2d(stage + kOperandBytes, &b, &full[at.stage], step * kDepth,
                      tile % columns * kTile);
          at.advance();
        }
      }
    }
  } else {
    more_registers<232>();
    float d[64];
    char* const box = shared + kOutAt + group * kOutBoxes * kOutBytes;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      int before = -1;
      for (int step = 0; step < steps; ++step) {
        const char* const stage = shared + at.stage * kStageBytes;
        full[at.stage].wait(at.parity);
        wgmma_fence(d);
        USP_UNROLL
        for (int i = 0; i < kDepth / 16; ++i) {
          const uint64_t left =
              descriptor(stage + group * 64 * kRowBytes + i * 32, Swizzle::bytes128, 0, 1024);
          const uint64_t right =
              descriptor(stage + kOperandBytes + i * 32, Swizzle::bytes128, 0, 1024);
          wgmma(d, left, right, step + i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (before >= 0 && thread == 0) empty[before].arrive();
        before = at.stage;
        at.advance();
      }
      wgmma_wait<0>(d);
      if (thread == 0) empty[before].arrive();

      const int row = wgmma_row(thread), column = wgmma_column(thread);
      const int top = tile / columns * kTile + group * 64, left = tile % columns * kTile;
      if constexpr (by_tma) {
        if (thread == 0) tma_store_wait_read<0>();
        named_barrier(1 + group, kGroup);
        USP_UNROLL
        for (int i = 0; i < 64; ++i) {
          const int x = column + i / 4 * 8 + i % 2, y = row + i / 2 % 2 * 8;
          float* const to =
              reinterpret_cast<float*>(box + x / kOutColumns * kOutBytes) + y * kOutColumns;
          to[x % kOutColumns] = d[i];
        }
        fence_proxy_async();
        named_barrier(1 + group, kGroup);
        if (thread == 0) {
          for (int i = 0; i < kOutBoxes; ++i) {
            tma_store_2d(&out, box + i * kOutBytes, left + i * kOutColumns, top);
          }
          tma_store_commit();
        }
      } else {
        USP_UNROLL
        for (int i = 0; i < 64; ++i) {
          const int x = left + column + i / 4 * 8 + i % 2, y = top + row + i / 2 % 2 * 8;
          if (x < n && y < m) c[static_cast<size_t>(y) * c_pitch + x] = d[i];
        }
      }
    }
    if (by_tma && thread == 0) tma_store_wait_read<0>();
  }
}

}  // namespace

void wgmma_product(const Product& x, bool by_tma, int blocks) {
  TensorMaps maps;
  const auto operand = [&](const __nv_bfloat16* from, int rows) -> const CUtensorMap& {
    return maps.of(boxed(from, rows, x.k, x.pitch, kTile, kDepth, CU_TENSOR_MAP_SWIZZLE_128B));
  };
  const CUtensorMap out =
      by_tma ? maps.of(boxed(x.c, x.m, x.n, x.c_pitch, 64, kOutColumns, CU_TENSOR_MAP_SWIZZLE_NONE))
             : CUtensorMap{};
  launch(by_tma ? wgmma_kernel<true> : wgmma_kernel<false>, blocks, kThreads, kSharedBytes, nullptr,
         operand(x.a, x.m), operand(x.b, x.n), out, x.c, x.m, x.n, x.k, x.c_pitch);
}

}  // namespace usp::hopper
