#include "swizzled.h"

/// Hopper: one thread asks for both tiles, in boxes that arrive swizzled; two warpgroups multiply
/// them where they lie, without registers for a and b. Nothing overlaps yet.
namespace usp::ladder {

namespace {

using namespace cuda;

constexpr int kTile = 128, kGroup = 128, kBlock = 2 * kGroup;
constexpr int kOperand = kTile * kRowBytes, kStage = 2 * kOperand;

__global__ void __launch_bounds__(kBlock)
    kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
           Product<bf16> p) {
  char* const shared = swizzled_shared();
  Barrier* const full = reinterpret_cast<Barrier*>(shared + kStage);
  const int top = static_cast<int>(blockIdx.y) * kTile, side = static_cast<int>(blockIdx.x) * kTile;
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  if (threadIdx.x == 0) {
    full->init(1);
    fence_barrier_init();
  }
  __syncthreads();
  float d[kTile / 2];
  for (int step = 0; step * kDepth < p.k; ++step) {
    // [step]
    if (threadIdx.x == 0) {
      full->arrive_expect(kStage);
      tma_load_2d(shared, &a, full, step * kDepth, top);
      tma_load_2d(shared + kOperand, &b, full, step * kDepth, side);
    }
    full->wait(step & 1);
    multiply(d, shared + group * kOperand / 2, shared + kOperand, step > 0);
    wgmma_wait<0>(d);
    __syncthreads();
    // [step]
  }
  store_group(p, top + group * kTile / 2, side, d);
}

/// Boxes are of the whole depth.
Cost cost(int64_t k) { return cost_of_tile(kTile, kTile, full_depth(k), sizeof(bf16), 2); }

void run(const Queue& queue, const Product<bf16>& p) {
  launch(kernel, {grid_of(p, kTile), kBlock, kStage + sizeof(Barrier)}, queue,
         map_of(p, p.a, p.m, p.k, p.a_pitch, kTile), map_of(p, p.b, p.n, p.k, p.b_pitch, kTile), p);
}

}  // namespace

const Rung<bf16> kTmaWgmma{"tma_wgmma", "boxes and warpgroups", 90, kTile, kTile, 8, cost, run};

}  // namespace usp::ladder
