#include "boxed_pairs.h"

/// Backward on Hopper, in the two passes of flash_2's. A block keeps 64 rows of two tensors for
/// each of two groups, and a third group brings boxes of the two others. Weights and their
/// gradients stay in the registers in which the next products take them.
namespace usp::attention {

namespace {

using namespace cuda;
using Given = Gradients<bf16>;
using Row = Given::Row;

template <int width>
__global__ void __launch_bounds__(kBlock, 1)
    keys_kernel(const __grid_constant__ BackwardMaps maps, Given g) {
  const Problem<bf16>& p = g.of;
  const BoxedPairs<width> place{swizzled_shared()};
  if (threadIdx.x == 0) place.init(kGroups * kGroup / kWarp);
  __syncthreads();
  const int side = static_cast<int>(blockIdx.y) * kOwnRows, sharing = p.heads / p.kv_heads;
  const int first_head = static_cast<int>(blockIdx.x) * sharing;
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const Head<bf16> own(p, first_head);
  const Tiles tiles = p.tiles_seeing(own.sample, side, kOwnRows, kGroupRows);
  const int steps = tiles.count * sharing;  // of all heads
  if (group == kGroups) {
    fewer_registers<24>();
    if (!is_first_of_group() || steps == 0) return;
    place.bring_own(maps.k, maps.v, p, own.sample, side, own.kv * width);
    bring_steps(place, steps, BoxedPairs<width>::kStage, [&](int step) {
      const int head = step / tiles.count, tile = tiles[step % tiles.count];
      place.bring_tiles(step, maps.q, maps.dout, p, own.sample, tile * kGroupRows,
                        (own.number + head) * width);
      const int row = (first_head + head) * (Given::rows_of(p.queries) / kGroupRows) + tile;
      tma_load_2d(place.rows(step), &maps.rows, &place.full(step), 0, row);
    });
    return;
  }
  more_registers<240>();
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int first = side + group * kGroupRows, key = first + wgmma_row(thread);
  Scores x;
  float dk[width / 2] = {}, dv[width / 2] = {};
  if (steps > 0) place.owned().wait(0);
  for (int step = 0; step < steps; ++step) {
    place.full(step).wait(step / BoxedPairs<width>::kStages & 1);
    x.begin(place, group, step);
    wgmma_wait<1>(x.s);
    const Row* const rows = place.rows(step) + wgmma_column(thread);
    if (!all_see(place.rows(step), first)) mask_queries(x.s, key, rows);
    USP_UNROLL
    for (int i = 0; i < kGroupRows / 2; ++i) {
      x.s[i] = weight_of(x.s[i], rows[i / 4 * 8 + i % 2], p.scale * kLog2e);
    }
    pack_all(x.weights, x.s);
    begin_sum(dv, x.weights, place.tile(step, 1));
    wgmma_wait<1>(x.ds);
    USP_UNROLL
    for (int i = 0; i < kGroupRows / 2; ++i) {
      x.ds[i] = dscore_of(x.ds[i], x.s[i], rows[i / 4 * 8 + i % 2]);
    }
    pack_all(x.dscores, x.ds);
    begin_sum(dk, x.dscores, place.tile(step, 0));
    wgmma_wait<0>(dv, dk);
    fence_proxy_async();  // each thread has read rows, which the next copy overwrites
    __syncwarp();
    if (lane() == 0) place.empty(step).arrive();
  }
  leave(g.dk, g.dk_sums, g.adds, g.of_dk, own.sample, own.kv, key, p.keys, dk, p.scale);
  leave(g.dv, g.dv_sums, g.adds, g.of_dv, own.sample, own.kv, key, p.keys, dv, 1);
}

template <int width>
__global__ void __launch_bounds__(kBlock, 1)
    queries_kernel(const __grid_constant__ BackwardMaps maps, Given g) {
  const Problem<bf16>& p = g.of;
  const BoxedPairs<width> place{swizzled_shared()};
  if (threadIdx.x == 0) place.init(kGroups);
  __syncthreads();
  const Turn turn = p.turn(static_cast<int>(blockIdx.x), kOwnRows);
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const Head<bf16> head(p, turn.head);
  const Tiles tiles = p.tiles_seen(head.sample, turn.first, kOwnRows, kGroupRows);
  if (group == kGroups) {
    fewer_registers<24>();
    if (!is_first_of_group() || tiles.count == 0) return;
    const int kv = head.kv * width;
    place.bring_own(maps.q, maps.dout, p, head.sample, turn.first, head.number * width);
    bring_steps(place, tiles.count, 2 * BoxedPairs<width>::kTile, [&](int step) {
      place.bring_tiles(step, maps.k, maps.v, p, head.sample, tiles[step] * kGroupRows, kv);
    });
    return;
  }
  more_registers<240>();
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int first = turn.first + group * kGroupRows, query = first + wgmma_row(thread);
  const Stretch seen_by_all = p.seen_by_all(head.sample, first, kGroupRows);
  const Row* const rows = g.rows + int64_t{turn.head} * Given::rows_of(p.queries) + query;
  const Row own[2] = {rows[0], rows[8]};
  const Stretch seen[2] = {own[0].seen, own[1].seen};
  Scores x;
  float dq[width / 2] = {};
  if (tiles.count > 0) place.owned().wait(0);
  for (int step = 0; step < tiles.count; ++step) {
    const int key = tiles[step] * kGroupRows;
    place.full(step).wait(step / BoxedPairs<width>::kStages & 1);
    x.begin(place, group, step);
    wgmma_wait<1>(x.s);
    if (!seen_by_all.holds(key, key + kGroupRows)) mask(x.s, key + wgmma_column(thread), seen);
    USP_UNROLL
    for (int i = 0; i < kGroupRows / 2; ++i) {
      x.s[i] = weight_of(x.s[i], own[i / 2 % 2], p.scale * kLog2e);
    }
    wgmma_wait<0>(x.ds);
    USP_UNROLL
    for (int i = 0; i < kGroupRows / 2; ++i) x.ds[i] = dscore_of(x.ds[i], x.s[i], own[i / 2 % 2]);
    pack_all(x.dscores, x.ds);
    begin_sum(dq, x.dscores, place.tile(step, 0));
    wgmma_wait<0>(dq);
    if (is_first_of_group()) place.empty(step).arrive();
  }
  leave(g.dq, g.dq_sums, g.adds, g.of_dq, head.sample, head.number, query, p.queries, dq, p.scale);
}

Cost cost(const Shape& x) { return cost_of_backward(x, kGroupRows, kBlock / kWarp); }

void run(const Queue& queue, const Given& g) {
  const Problem<bf16>& p = g.of;
  const int64_t heads = int64_t{p.samples} * p.heads, rows = Given::rows_of(p.queries);
  const int64_t kv_heads = int64_t{p.samples} * p.kv_heads, across = ceil_div(p.keys, kOwnRows);
  keep_rows(queue, g);
  const BackwardMaps maps = maps_of(g);
  with_width(p.width, [&](auto width) {
    constexpr int kBytes = BoxedPairs<width>::kBytes;
    launch(keys_kernel<width>, {{kv_heads, across}, kBlock, kBytes}, queue, maps, g);
    launch(queries_kernel<width>, rows / kOwnRows * heads, kBlock, kBytes, queue, maps, g);
  });
}

}  // namespace

const Rung<bf16, Given> kFlash3Backward{
    "flash_3_backward", "boxes, and products of a warpgroup", 90, kOwnRows, kGroupRows, cost, run};

}  // namespace usp::attention
