#include <iterator>
#include <set>

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
    bool brought = false;  // by the first queries that see any of them, if there are some
    for (int top = 0; top < p.queries; top += kTile) {
      if (first > 0 && !p.tiles_seen(head.sample, top, kTile, kTile).holds(first / kTile)) continue;
      if (!brought) {
        bring<width>(keys, head.k, head.k_pitch, first, p.keys);
        bring<width>(values, head.v, head.v_pitch, first, p.keys);
        brought = true;
      }
      const int row = top + first_row();
      bring<width>(queries, head.q, head.pitch, top, p.queries);
      __syncthreads();
      Rows<width> rows(p, head.sample, row);
      for (int r = 0; first > 0 && r < kRows && row + r < p.queries; ++r) {
        const float* const out = head.out + int64_t{row + r} * head.out_pitch + lane();
        rows.max[r] = head.lse[row + r];
        rows.sum[r] = lane() == 0 && rows.max[r] > -kInfinity<float> ? 1 : 0;
        for (int c = 0; c < width / kTile; ++c) rows.result[r][c] = out[c * kTile];
      }
      rows.take(p.scale, queries, keys, values, weights, first);
      rows.finish(head, row, p.queries);
      __syncthreads();
    }
  }
}

/// Keys and values once, if a query sees them. For each tile of scores queries are read, outputs
/// and lse written, and but for the first tile of keys, which all queries meet, read before; with
/// documents, their begins.
Cost cost(const Shape& x) {
  const int64_t down = x.samples * ceil_div(x.queries, kTile), across = ceil_div(x.keys, kTile);
  int64_t tiles = down, brought = 0;
  for (int sample = 0; sample < x.samples; ++sample) {
    std::set<int> numbers = {0};
    for (int top = 0; top < x.queries; top += kTile) {
      const Tiles seen = x.tiles_seen(sample, top, kTile, kTile);
      tiles += seen.count - seen.holds(0);
      for (int step = 0; step < seen.count; ++step) numbers.insert(seen[step]);
    }
    brought += std::ssize(numbers);
  }
  const int64_t row = int64_t{x.width} * int64_t{sizeof(float)};
  const int64_t looked_up = (across - 1) * stretches_of(x, x.query_at, x.queries, kTile);
  const int64_t head = 2 * brought * kTile * row + tiles * kTile * row +
                       (2 * tiles - down) * kTile * (row + kSector) +
                       bytes_of_begins(x, tiles * kTile + kWarps * looked_up);
  return {x.heads * head, x.heads * 4 * tiles * kTile * kTile * x.width,
          int64_t{x.samples} * x.heads};
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
