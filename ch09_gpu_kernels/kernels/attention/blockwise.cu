#include "rows.h"

/// The loops change places: a block keeps 32 queries, and keys and values pass by. Outputs stay in
/// registers until they are divided, once; blocks are as many as tiles of queries; and those of
/// which no key is seen are not read. FlashAttention 2's order.
namespace usp::attention {

namespace {

using namespace cuda;

template <int width>
__global__ void __launch_bounds__(kBlock, 1) kernel(Problem<float> p) {
  float* const queries = dynamic_shared<float>();
  float *const keys = queries + kElements<width>, *const values = keys + kElements<width>;
  float* const weights = values + kElements<width> + first_row() * kTile;
  const Head<float> head(p, static_cast<int>(blockIdx.y));
  const int top = static_cast<int>(blockIdx.x) * kTile, row = top + first_row();
  const Tiles tiles = p.tiles_seen(head.sample, top, kTile, kTile);
  bring<width>(queries, head.q, head.pitch, top, p.queries);
  Rows<width> rows(p, head.sample, row);
  for (int step = 0; step < tiles.count; ++step) {
    const int first = tiles[step] * kTile;
    bring<width>(keys, head.k, head.k_pitch, first, p.keys);
    bring<width>(values, head.v, head.v_pitch, first, p.keys);
    __syncthreads();
    rows.take(p.scale, queries, keys, values, weights, first);
    __syncthreads();
  }
  rows.finish(head, row, p.queries);
}

/// Queries, outputs and lse once; keys and values once a block; with documents, their begins.
Cost cost(const Shape& x) {
  const int64_t down = x.samples * ceil_div(x.queries, kTile),
                tiles = count_tiles(x, kTile, kTile).tiles;
  const int64_t row = int64_t{x.width} * int64_t{sizeof(float)};
  const int64_t rows = int64_t{x.samples} * x.queries;
  const int64_t head =
      2 * (down + tiles) * kTile * row + rows * kSector +
      bytes_of_begins(x, rows + kWarps * stretches_of(x, x.query_at, x.queries, kTile));
  return {x.heads * head, x.heads * 4 * tiles * kTile * kTile * x.width, x.heads * down};
}

void run(const Queue& queue, const Problem<float>& p) {
  with_width(p.width, [&](auto width) {
    launch(kernel<width>,
           {{ceil_div(p.queries, kTile), int64_t{p.samples} * p.heads},
            kBlock,
            (3 * kElements<width> + kTile * kTile) * int64_t{sizeof(float)}},
           queue, p);
  });
}

}  // namespace

const Rung<float> kBlockwise{"blockwise", "tiles of queries, keys pass by", 75, kTile, kTile, cost,
                             run};

}  // namespace usp::attention
