#include "rows.h"

/// No score goes to memory. A block has a head: it keeps a tile of keys and values and walks over
/// all queries, whose outputs so far it reads and writes back. An output and its lse are all that a
/// row needs to go on: the rows' maximum is then the lse, and their sum is 1.
namespace usp::attention {

namespace {

using namespace cuda;

template <int width>
__global__ void __launch_bounds__(kBlock, 1) kernel(Problem<float> p) {
  float* const keys = dynamic_shared<float>();
  float *const values = keys + kElements<width>, *const queries = values + kElements<width>;
  float* const weights = queries + kElements<width> + first_row() * kTile;
  const Head<float> head(p, static_cast<int>(blockIdx.x));
  for (int first = 0; first < p.keys; first += kTile) {
    bring<width>(keys, head.k, head.kv_pitch, first, p.keys);
    bring<width>(values, head.v, head.kv_pitch, first, p.keys);
    for (int top = 0; top < p.queries; top += kTile) {
      if (first > 0 && p.seen_by(top + kTile - 1) <= first) continue;
      const int row = top + first_row();
      bring<width>(queries, head.q, head.pitch, top, p.queries);
      __syncthreads();
      Rows<width> rows;
      rows.clear();
      for (int r = 0; first > 0 && r < kRows && row + r < p.queries; ++r) {
        const float* const out = head.out + int64_t{row + r} * head.pitch + lane();
        rows.max[r] = head.lse[row + r];
        rows.sum[r] = lane() == 0 && rows.max[r] > -kInfinity<float> ? 1 : 0;
        for (int c = 0; c < width / kTile; ++c) rows.result[r][c] = out[c * kTile];
      }
      rows.take(p, p.scale, row, queries, keys, values, weights, first);
      rows.finish(head, row, p.queries);
      __syncthreads();
    }
  }
}

/// Keys and values once. For each tile of scores queries are read, outputs and lse written, and
/// but for the first tile of keys read before.
Cost cost(const Shape& x) {
  const int64_t down = ceil_div(x.queries, kTile);
  int64_t tiles = down;
  for (int first = kTile; first < x.keys; first += kTile) {
    for (int top = 0; top < x.queries; top += kTile) tiles += x.seen_by(top + kTile - 1) > first;
  }
  const int64_t row = int64_t{x.width} * int64_t{sizeof(float)};
  const int64_t head = 2 * ceil_div(x.keys, kTile) * kTile * row + tiles * kTile * row +
                       (2 * tiles - down) * kTile * (row + kSector);
  const int64_t heads = int64_t{x.samples} * x.heads;
  return {heads * head, heads * 4 * tiles * kTile * kTile * x.width, heads};
}

void run(const Queue& queue, const Problem<float>& p) {
  with_width(p.width, [&](auto width) {
    launch(kernel<width>, int64_t{p.samples} * p.heads, kBlock,
           (3 * kElements<width> + kTile * kTile) * int64_t{sizeof(float)}, queue, p);
  });
}

}  // namespace

const Rung<float> kFlash1{"flash_1", "tiles of keys, queries pass by", 75, kTile, kTile, cost, run};

}  // namespace usp::attention
