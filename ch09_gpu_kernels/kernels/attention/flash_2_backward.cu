#include <algorithm>

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
  const Problem<bf16>& p = g.of;
  const int row = static_cast<int>(warp_of_grid()), rows = Given::rows_of(p.queries);
  const Head<bf16> head(p, static_cast<int>(blockIdx.y));
  if (row >= rows) return;
  float lse = -INFINITY, delta = 0;
  if (row < p.queries) {
    const int64_t at = head.out - p.out + int64_t{row} * head.pitch;
    for (int x = lane() * 2; x < p.width; x += 2 * kWarp) {
      const auto dout = load_pack<2>(g.dout + at + x), out = load_pack<2>(p.out + at + x);
      delta += dout[0] * out[0] + dout[1] * out[1];
    }
    delta = warp_sum(delta);
    lse = head.lse[row];
  }
  const Numbers<float, 2> kept{{lse == -INFINITY ? INFINITY : lse * kLog2e, delta}};
  if (lane() == 0) store_pack<2>(&g.rows[int64_t{blockIdx.y} * rows + row].lse, kept);
}

template <int width>
__global__ void __launch_bounds__(kEightWarps, 1) keys_kernel(Given g) {
  const Problem<bf16>& p = g.of;
  const Pairs<width> pairs{swizzled_shared()};
  const int side = static_cast<int>(blockIdx.x) * kOwnRows, group = p.heads / p.kv_heads;
  const int first_head = static_cast<int>(blockIdx.y) * group;
  const int begin = p.first_to_see(side) / kStep, end = (p.queries + kStep - 1) / kStep;
  const int tiles = max(0, end - begin), steps = tiles * group;  // of a head, of all
  const auto top_of = [&](int step) { return (begin + step % tiles) * kStep; };
  const auto bring_step = [&](int step) {
    if (step < steps) {
      const int index = first_head + step / tiles, top = top_of(step);
      const Head<bf16> head(p, index);
      pairs.bring_tiles(step, head.q, g.dout + (head.q - p.q), head.pitch, top, p.queries);
      const Given::Row* const rows = g.rows + int64_t{index} * Given::rows_of(p.queries) + top;
      const int two = static_cast<int>(threadIdx.x) * 2;  // 16 bytes
      if (two < kStep) cp_async_16(pairs.rows(step) + two, rows + two);
    }
    cp_async_commit();
  };
  const Head<bf16> own(p, first_head);
  const int first = side + warp() * kWarpRows, key = first + lane() / 4;
  float s[kStep / 2], ds[kStep / 2], dk[width / 2] = {}, dv[width / 2] = {};
  if (steps > 0) pairs.bring_own(own.k, own.v, own.kv_pitch, side, p.keys);
  bring_step(0);
  for (int step = 0; step < steps; ++step) {
    bring_step(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    pairs.multiply_both(s, ds, step);
    const bool all_see = p.seen_by(top_of(step)) >= first + kWarpRows;
    USP_UNROLL
    for (int i = 0; i < kStep / 2; ++i) {
      const int query = i / 4 * 8 + lane() % 4 * 2 + i % 2;
      if (!all_see && key + i / 2 % 2 * 8 >= p.seen_by(top_of(step) + query)) s[i] = -INFINITY;
      weigh(s[i], ds[i], pairs.rows(step)[query], p.scale * kLog2e);
    }
    add_weighted(dv, s, pairs.tile(step, 1));
    add_weighted(dk, ds, pairs.tile(step, 0));
    __syncthreads();
  }
  store_rows(g.dk + (own.k - p.k), own.kv_pitch, key, p.keys, dk, {p.scale, p.scale});
  store_rows(g.dv + (own.k - p.k), own.kv_pitch, key, p.keys, dv, {1, 1});
}

/// Blocks with the most keys begin first.
template <int width>
__global__ void __launch_bounds__(kEightWarps, 1) queries_kernel(Given g) {
  const Problem<bf16>& p = g.of;
  const Pairs<width> pairs{swizzled_shared()};
  const int top = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kOwnRows;
  const int first = top + warp() * kWarpRows, query = first + lane() / 4;
  const Head<bf16> head(p, static_cast<int>(blockIdx.y));
  const int end = p.seen_by(min(top + kOwnRows, p.queries) - 1);
  const auto bring_step = [&](int step) {
    const int key = step * kStep;
    if (key < end) pairs.bring_tiles(step, head.k, head.v, head.kv_pitch, key, p.keys);
    cp_async_commit();
  };
  const Given::Row* const rows = g.rows + int64_t{blockIdx.y} * Given::rows_of(p.queries) + query;
  const Given::Row own[2] = {rows[0], rows[8]};
  const int seen[2] = {p.seen_by(query), p.seen_by(query + 8)};
  float s[kStep / 2], ds[kStep / 2], dq[width / 2] = {};
  if (end > 0) {
    pairs.bring_own(head.q, g.dout + (head.q - p.q), head.pitch, top, p.queries);
  }
  bring_step(0);
  for (int step = 0; step * kStep < end; ++step) {
    bring_step(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    pairs.multiply_both(s, ds, step);
    if ((step + 1) * kStep > p.seen_by(first)) mask(s, step * kStep + lane() % 4 * 2, seen);
    USP_UNROLL
    for (int i = 0; i < kStep / 2; ++i) weigh(s[i], ds[i], own[i / 2 % 2], p.scale * kLog2e);
    add_weighted(dq, ds, pairs.tile(step, 0));
    __syncthreads();
  }
  store_rows(g.dq + (head.q - p.q), head.pitch, query, p.queries, dq, {p.scale, p.scale});
}

/// Each gradient is written by half a sector, as outputs are.
Cost cost(const Shape& x) {
  const int64_t row = x.width * int64_t{sizeof(bf16)}, of_row = sizeof(Given::Row), sector = 32;
  const int64_t heads = int64_t{x.samples} * x.heads, kv_heads = int64_t{x.samples} * x.kv_heads;
  const int64_t down = ceil_div(x.queries, kOwnRows), across = ceil_div(x.keys, kOwnRows);
  const int64_t seen = tiles_of(x, kOwnRows, kStep), seeing = tiles_of_keys(x, kOwnRows, kStep);
  const int64_t of_rows = x.queries * (2 * row + sector) + Given::rows_of(x.queries) * sector;
  const int64_t of_keys = across * kOwnRows * 2 * row + 2 * x.keys * 2 * row;
  const int64_t of_queries = down * kOwnRows * (2 * row + of_row) + x.queries * 2 * row;
  const int64_t passing = kStep * (seeing * (2 * row + of_row) + seen * 2 * row);
  return {heads * (of_rows + of_queries + passing) + kv_heads * of_keys,
          heads * 2 * kOwnRows * kStep * x.width * (4 * seeing + 3 * seen),
          std::min(heads * down, kv_heads * across)};
}

void run(const Queue& queue, const Given& g) {
  const int64_t heads = int64_t{g.of.samples} * g.of.heads, rows = Given::rows_of(g.of.queries);
  const int64_t kv_heads = heads / g.of.heads * g.of.kv_heads;
  const int64_t across = ceil_div(g.of.keys, kOwnRows);
  launch(rows_kernel, {{rows / (kEightWarps / kWarp), heads}, kEightWarps}, queue, g);
  with_width(g.of.width, [&](auto width) {
    constexpr int kBytes = Pairs<width>::kBytes;
    launch(keys_kernel<width>, {{across, kv_heads}, kEightWarps, kBytes}, queue, g);
    launch(queries_kernel<width>, {{rows / kOwnRows, heads}, kEightWarps, kBytes}, queue, g);
  });
}

}  // namespace

const Rung<bf16, Given> kFlash2Backward{
    "flash_2_backward", "recomputed weights, dq in a second pass", 80, kOwnRows, kStep, cost, run};

}  // namespace usp::attention
