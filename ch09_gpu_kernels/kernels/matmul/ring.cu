#include "swizzled.h"

/// A ring of stages: a warp of its own asks for tiles, two warpgroups multiply them. They hand each
/// other stages by two barriers a stage, and the copies run ahead by as many as there are.
namespace usp::ladder {

namespace {

using namespace cuda;

constexpr int kTile = 128, kStages = 4, kGroup = 128, kGroups = 2;
constexpr int kBlock = kGroups * kGroup + kWarp;
constexpr int kOperand = kTile * kRowBytes, kStage = 2 * kOperand;
constexpr int kShared = kStages * (kStage + 2 * static_cast<int>(sizeof(Barrier)));

__global__ void __launch_bounds__(kBlock)
    kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
           Product<bf16> p) {
  char* const shared = swizzled_shared();
  Barrier* const full = reinterpret_cast<Barrier*>(shared + kStages * kStage);
  Barrier* const empty = full + kStages;
  const int top = static_cast<int>(blockIdx.y) * kTile, side = static_cast<int>(blockIdx.x) * kTile;
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const bool first = threadIdx.x % kGroup == 0;  // of its group, or of the warp that brings
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kGroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int steps = static_cast<int>(ceil_div(p.k, kDepth));
  if (group == kGroups) {
    // [brings]
    for (int step = 0; first && step < steps; ++step) {
      const int at = step % kStages;
      char* const stage = shared + at * kStage;
      empty[at].wait((step / kStages & 1) ^ 1);
      full[at].arrive_expect(kStage);
      tma_load_2d(stage, &a, &full[at], step * kDepth, top);
      tma_load_2d(stage + kOperand, &b, &full[at], step * kDepth, side);
    }
    // [brings]
    return;
  }
  float d[kTile / 2];
  for (int step = 0; step < steps; ++step) {
    const int at = step % kStages;
    const char* const stage = shared + at * kStage;
    full[at].wait(step / kStages & 1);
    multiply(d, stage + group * kOperand / 2, stage + kOperand, step > 0);
    wgmma_wait<1>();  // the step before has read its stage
    if (first && step > 0) empty[(step - 1) % kStages].arrive();
  }
  wgmma_wait<0>(d);
  store_group(p, top + group * kTile / 2, side, d);
}

/// The same bytes.
Cost cost(int64_t k) { return cost_of_tile(kTile, kTile, full_depth(k), sizeof(bf16), 2); }

void run(const Queue& queue, const Product<bf16>& p) {
  launch(kernel, {grid_of(p, kTile), kBlock, kShared}, queue,
         map_of(p, p.a, p.m, p.k, p.a_pitch, kTile), map_of(p, p.b, p.n, p.k, p.b_pitch, kTile), p);
}

}  // namespace

const Rung<bf16> kRing{"ring", "stages, and a warp that brings", 90, kTile, kTile, 8, cost, run};

}  // namespace usp::ladder
