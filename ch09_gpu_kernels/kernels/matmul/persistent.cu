#include <algorithm>

#include "cuda/device_limits.h"
#include "swizzled.h"

/// Each block takes every gridDim.x-th tile of c: while warpgroups write one, the tiles of a and b
/// of the next are on their way. The group that brings gives registers to the two that multiply, so
/// that a tile has 128 x 256 elements. c leaves in boxes, by way of two buffers a group.
namespace usp::ladder {

namespace {

using namespace cuda;

constexpr int kRows = 128, kColumns = 256, kStages = 4, kGroups = 2, kGroup = 128;
constexpr int kBlock = kGroup * (kGroups + 1);
constexpr int kLeft = kRows * kRowBytes, kStage = kLeft + kColumns * kRowBytes;
constexpr int kBoxRows = kRows / kGroups, kBox = kBoxRows * kRowBytes;  // of c: 64 x 64
constexpr int kBoxes = kColumns / kDepth, kBuffers = 2;
constexpr int kOutAt = kStages * kStage, kBarriersAt = kOutAt + kGroups * kBuffers * kBox;
constexpr int kShared = kBarriersAt + 2 * kStages * static_cast<int>(sizeof(Barrier));

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

/// The tiles of c that this block takes: use(top, side) for each.
template <class F>
__device__ void each_tile(const Product<bf16>& p, F use) {
  // [takes_tiles]
  const int across = (p.n + kColumns - 1) / kColumns, tiles = (p.m + kRows - 1) / kRows * across;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    use(tile / across * kRows, tile % across * kColumns);
  }
  // [takes_tiles]
}

/// A group's 64 rows of a tile: 64 columns at a time go to a buffer, and from there in one box.
__device__ void store(char* buffers, const CUtensorMap& c, int top, int side, int group,
                      float (&d)[kColumns / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % kWarp;
  const int row = thread / kWarp * 16 + lane % 16;
  USP_UNROLL
  for (int box = 0; box < kBoxes; ++box) {
    char* const buffer = buffers + box % kBuffers * kBox;
    if (thread == 0) tma_store_wait_read<kBuffers - 1>();
    named_barrier(1 + group, kGroup);
    USP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float* const from = d + box * 32 + i * 8;
      const uint32_t words[4] = {pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]),
                                 pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7])};
      stmatrix_x4(buffer + place(row, i * 2 + lane / 16), words);
    }
    fence_proxy_async();
    named_barrier(1 + group, kGroup);
    if (thread == 0) {
      tma_store_2d(&c, buffer, side + box * kDepth, top);
      tma_store_commit();
    }
  }
}

__global__ void __launch_bounds__(kBlock, 1)
    kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
           const __grid_constant__ CUtensorMap c, Product<bf16> p) {
  char* const shared = swizzled_shared();
  Barrier* const full = reinterpret_cast<Barrier*>(shared + kBarriersAt);
  Barrier* const empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kGroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int steps = (p.k + kDepth - 1) / kDepth, group = static_cast<int>(threadIdx.x) / kGroup;
  const bool first = threadIdx.x % kGroup == 0;
  Place at;
  if (group == kGroups) {
    fewer_registers<40>();
    if (!first) return;
    each_tile(p, [&](int top, int side) {
      for (int step = 0; step < steps; ++step) {
        char* const stage = shared + at.stage * kStage;
        empty[at.stage].wait(at.parity ^ 1);
        full[at.stage].arrive_expect(kStage);
        tma_load_2d(stage, &a, &full[at.stage], step * kDepth, top);
        tma_load_2d(stage + kLeft, &b, &full[at.stage], step * kDepth, side);
        at.advance();
      }
    });
    return;
  }
  more_registers<232>();
  float d[kColumns / 2];
  each_tile(p, [&](int top, int side) {
    int before = -1;
    for (int step = 0; step < steps; ++step) {
      const char* const stage = shared + at.stage * kStage;
      full[at.stage].wait(at.parity);
      multiply(d, stage + group * kBoxRows * kRowBytes, stage + kLeft, step > 0);
      wgmma_wait<1>();
      if (first && before >= 0) empty[before].arrive();
      before = at.stage;
      at.advance();
    }
    wgmma_wait<0>(d);
    if (first) empty[before].arrive();
    store(shared + kOutAt + group * kBuffers * kBox, c, top + group * kBoxRows, side, group, d);
  });
  if (first) tma_store_wait_read<0>();
}

/// Wider tiles, so fewer bytes an element; c in whole lines.
Cost cost(int64_t k) { return cost_of_tile(kRows, kColumns, full_depth(k), sizeof(bf16)); }

void run(const Queue& queue, const Product<bf16>& p) {
  const int64_t tiles = ceil_div(p.m, kRows) * ceil_div(p.n, kColumns);
  const int64_t blocks = p.blocks > 0 ? p.blocks : limits_of_this_device().multiprocessors;
  launch(kernel, {{std::min(tiles, blocks)}, kBlock, kShared}, queue,
         map_of(p, p.a, p.m, p.k, p.a_pitch, kRows), map_of(p, p.b, p.n, p.k, p.b_pitch, kColumns),
         map_of(p, p.c, p.m, p.n, p.c_pitch, kBoxRows), p);
}

}  // namespace

const Rung<bf16> kPersistent{
    "persistent", "groups with a task each, tile after tile", 90, kRows, kColumns, 8, cost, run};

}  // namespace usp::ladder
