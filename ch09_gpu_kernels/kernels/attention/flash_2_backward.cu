#include "backward.h"

/// Backward of flash_2: weights are computed anew, from what forward left of each row. A block has
/// keys and meets the queries that see them, for dk and dv; in a second pass a block has queries
/// and meets keys, for dq. So each gradient is summed by one thread in one order, and no block adds
/// to what another one writes. Seven products, where one pass would need five.
namespace usp::attention {

namespace {

using namespace cuda;
using Given = Gradients<bf16>;

/// A warp a row.
__global__ void __launch_bounds__(kEightWarps) rows_kernel(Given g) {
  const int row = static_cast<int>(warp_of_grid()), rows = Given::rows_of(g.of.queries);
  if (row >= rows) return;
  const Given::Row kept = keep(g, static_cast<int>(blockIdx.y), row);
  if (lane() == 0) g.rows[int64_t{blockIdx.y} * rows + row] = kept;
}

template <int width, int value_width>
__global__ void __launch_bounds__(kEightWarps, 1) keys_kernel(Given g) {
  constexpr int kStep = step_of(width);
  if constexpr (!has_shared(Pairs<width, value_width>::kBytes)) return;
  const Problem<bf16>& p = g.of;
  const Pairs<width, value_width> pairs{swizzled_shared()};
  const int side = static_cast<int>(blockIdx.y) * kOwnRows, group = p.heads / p.kv_heads;
  const int first_head = static_cast<int>(blockIdx.x) * group;
  const Head<bf16> own(p, first_head);
  const Tiles tiles = p.tiles_seeing(own.sample, side, kOwnRows, kStep);
  const int steps = tiles.count * group;  // of all heads
  const auto bring_step = [&](int step) {
    if (step < steps) {
      const int index = first_head + step / tiles.count, top = tiles[step % tiles.count] * kStep;
      const Head<bf16> head(p, index);
      pairs.bring_tiles(step, {head.q, head.pitch}, dout_of(g, head), top, p.queries);
      const Given::Row* const rows = g.rows + int64_t{index} * Given::rows_of(p.queries) + top;
      const int row = static_cast<int>(threadIdx.x);
      if (row < kStep) cp_async_16(pairs.rows(step) + row, rows + row);
    }
    cp_async_commit();
  };
  const int first = side + warp() * kWarpRows, key = first + lane() / 4;
  float s[kStep / 2], ds[kStep / 2], dk[width / 2] = {}, dv[value_width / 2] = {};
  if (steps > 0) pairs.bring_own({own.k, own.k_pitch}, {own.v, own.v_pitch}, side, p.keys);
  bring_step(0);
  for (int step = 0; step < steps; ++step) {
    bring_step(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    pairs.multiply_first(s, step);
    const Given::Row* const rows = pairs.rows(step);
    const Stretch seen_by_all{rows[kStep - 1].seen.from, rows[0].seen.to};
    const bool all_see = seen_by_all.holds(first, first + kWarpRows);
    USP_UNROLL
    for (int i = 0; i < kStep / 2; ++i) {
      const Given::Row row = rows[i / 4 * 8 + lane() % 4 * 2 + i % 2];
      const int own_key = key + i / 2 % 2 * 8;
      if (!all_see && !row.seen.holds(own_key, own_key + 1)) s[i] = -INFINITY;
      s[i] = weight_of(s[i], row, p.scale * kLog2e);
    }
    add_weighted(dv, s, pairs.tile(step, 1));
    pairs.multiply_second(ds, step);  // no earlier: dv has the registers
    USP_UNROLL
    for (int i = 0; i < kStep / 2; ++i) {
      ds[i] = dscore_of(ds[i], s[i], rows[i / 4 * 8 + lane() % 4 * 2 + i % 2]);
    }
    add_weighted(dk, ds, pairs.tile(step, 0));
    __syncthreads();
  }
  leave(g.dk, g.dk_sums, g.adds, g.of_dk, own.sample, own.kv, key, p.keys, dk, p.scale);
  leave(g.dv, g.dv_sums, g.adds, g.of_dv, own.sample, own.kv, key, p.keys, dv, 1);
  if constexpr (value_width < width) pad<width - value_width>(g, own, key);
}

template <int width, int value_width>
__global__ void __launch_bounds__(kEightWarps, 1) queries_kernel(Given g) {
  constexpr int kStep = step_of(width);
  if constexpr (!has_shared(Pairs<width, value_width>::kBytes)) return;
  const Problem<bf16>& p = g.of;
  const Pairs<width, value_width> pairs{swizzled_shared()};
  const Turn turn = p.turn(static_cast<int>(blockIdx.x), kOwnRows);
  const int top = turn.first, first = top + warp() * kWarpRows, query = first + lane() / 4;
  const Head<bf16> head(p, turn.head);
  const Tiles tiles = p.tiles_seen(head.sample, top, kOwnRows, kStep);
  const Stretch seen_by_all = p.seen_by_all(head.sample, first, kWarpRows);
  const auto bring_step = [&](int step) {
    if (step < tiles.count) {
      pairs.bring_tiles(step, {head.k, head.k_pitch}, {head.v, head.v_pitch}, tiles[step] * kStep,
                        p.keys);
    }
    cp_async_commit();
  };
  const Given::Row* const rows = g.rows + int64_t{turn.head} * Given::rows_of(p.queries) + query;
  const Given::Row own[2] = {rows[0], rows[8]};
  const Stretch seen[2] = {own[0].seen, own[1].seen};
  float s[kStep / 2], ds[kStep / 2], dq[width / 2] = {};
  if (tiles.count > 0) pairs.bring_own({head.q, head.pitch}, dout_of(g, head), top, p.queries);
  bring_step(0);
  for (int step = 0; step < tiles.count; ++step) {
    const int key = tiles[step] * kStep;
    bring_step(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    pairs.multiply_first(s, step);
    pairs.multiply_second(ds, step);
    if (!seen_by_all.holds(key, key + kStep)) mask(s, key + lane() % 4 * 2, seen);
    USP_UNROLL
    for (int i = 0; i < kStep / 2; ++i) weigh(s[i], ds[i], own[i / 2 % 2], p.scale * kLog2e);
    add_weighted(dq, ds, pairs.tile(step, 0));
    __syncthreads();
  }
  leave(g.dq, g.dq_sums, g.adds, g.of_dq, head.sample, head.number, query, p.queries, dq, p.scale);
}

Cost cost(const Shape& x) { return cost_of_backward(x, step_of(x.width), kEightWarps / kWarp); }

void run(const Queue& queue, const Given& g) {
  const int64_t heads = int64_t{g.of.samples} * g.of.heads, rows = Given::rows_of(g.of.queries);
  const int64_t kv_heads = heads / g.of.heads * g.of.kv_heads, own = ceil_div(g.of.keys, kOwnRows);
  keep_rows(queue, g);
  with_widths(g.of.width, [&](auto width, auto value_width) {
    constexpr int kBytes = Pairs<width, value_width>::kBytes;
    launch(keys_kernel<width, value_width>, {{kv_heads, own}, kEightWarps, kBytes}, queue, g);
    launch(queries_kernel<width, value_width>, rows / kOwnRows * heads, kEightWarps, kBytes, queue,
           g);
  });
}

}  // namespace

void keep_rows(const Queue& queue, const Given& g) {
  const int64_t heads = int64_t{g.of.samples} * g.of.heads, rows = Given::rows_of(g.of.queries);
  launch(rows_kernel, {{rows / (kEightWarps / kWarp), heads}, kEightWarps}, queue, g);
}

static_assert(Pairs<kWidestKeys, kWidestValues>::kBytes <= kSharedOfWidest);

const Rung<bf16, Given> kFlash2Backward{"flash_2_backward",
                                        "recomputed weights, dq in a second pass",
                                        80,
                                        kOwnRows,
                                        step_of(kWidestValues),
                                        cost,
                                        run,
                                        /*keeps_scores=*/false,
                                        kWidestKeys};

}  // namespace usp::attention
