#include <algorithm>

#include "merge.h"
#include "warps.h"

/// Decoding: one query a head, and a long cache of keys. There are as many blocks as heads of keys,
/// too few for a GPU, so the keys are split. Each part has a block of its own, which leaves its
/// output and lse, and a second kernel merges the parts. The heads that share keys are the rows of
/// a tile, so that keys are read once for all of them. Flash-Decoding.
namespace usp::attention {

namespace {

using namespace cuda;

/// A block is a warp: its multiprocessor holds others meanwhile. A part of fewer than kLeastTiles
/// tiles would write and read more for the merge than splitting gains.
constexpr int kKeys = 32, kStages = 2, kBlocksHeld = 4, kLeastTiles = 4;

/// The tiles of keys that the query sees any of.
__host__ __device__ Tiles tiles_of(const Stretch& seen) {
  Tiles tiles;
  tiles.add(seen, kKeys);
  return tiles;
}

/// The first of `count` tiles that belongs to a part.
__device__ int begin_of(int part, int splits, int count) {
  return static_cast<int>(int64_t{count} * part / splits);
}

template <int width>
__global__ void __launch_bounds__(kWarp) kernel(Problem<bf16> p) {
  constexpr int kTile = kKeys * width * 2, kStage = 2 * kTile;
  char* const queries = swizzled_shared();
  char* const stages = queries + kWarpRows * width * 2;
  const int group = p.heads / p.kv_heads, across = static_cast<int>(ceil_div(group, kWarpRows));
  const int index = static_cast<int>(blockIdx.x), part = static_cast<int>(blockIdx.y);
  const int first_head = index % across * kWarpRows, row = lane() / 4;
  Head<bf16> head(p, index / across * group + first_head);
  head.lse += int64_t{part} * p.samples * p.heads;
  if (p.splits > 1) head.wide_out += int64_t{part} * p.samples * p.heads * width;
  const Stretch of_all = p.seen_by(head.sample, 0), seen[2] = {of_all, of_all};
  const Tiles tiles = tiles_of(of_all);
  const int begin = begin_of(part, p.splits, tiles.count);
  const int end = begin_of(part + 1, p.splits, tiles.count);
  const auto bring_tile = [&](int step) {
    char* const stage = stages + step % kStages * kStage;
    if (step < end) {
      const int first = tiles[step] * kKeys;
      bring<width, kKeys, kWarp>(stage, head.k, head.k_pitch, first, p.keys);
      bring<width, kKeys, kWarp>(stage + kTile, head.v, head.v_pitch, first, p.keys);
    }
    cp_async_commit();
  };
  OnlineSoftmax softmax;
  float s[kKeys / 2], o[width / 2] = {};
  if (begin < end) {
    bring<width, kWarpRows, kWarp>(queries, head.q, head.pitch, 0, group - first_head);
  }
  bring_tile(begin);
  for (int step = begin; step < end; ++step) {
    const int first = tiles[step] * kKeys;
    const char* const stage = stages + step % kStages * kStage;
    bring_tile(step + 1);
    cp_async_wait<1>();
    __syncwarp();
    multiply<width, kWarpRows>(s, queries, stage);
    if (!of_all.holds(first, first + kKeys)) mask(s, first + lane() % 4 * 2, seen);
    softmax.take(s, p.scale * kLog2e);
    USP_UNROLL
    for (int i = 0; i < width / 2; ++i) o[i] *= softmax.factor[i / 2 % 2];
    add_weighted(o, s, stage + kTile);
    __syncwarp();
  }
  finish(p, head, row, group - first_head, softmax, o);
}

/// Blocks of a part: for each head of keys, 16 of its queries.
int64_t blocks_of(const Shape& x) {
  return int64_t{x.samples} * x.kv_heads * ceil_div(x.heads / x.kv_heads, kWarpRows);
}

/// A part that has a tile reads its queries. Outputs of parts are written in f32 by whole sectors,
/// those of a whole in bf16 by half ones: the same bytes. The merge reads each lse twice.
Cost cost(const Shape& x) {
  const int64_t row = x.width * int64_t{sizeof(bf16)}, rows = int64_t{x.samples} * x.heads;
  const int group = x.heads / x.kv_heads;
  int64_t tiles = 0, parts = 0;  // of a head, in all samples
  for (int sample = 0; sample < x.samples; ++sample) {
    const int count = tiles_of(x.seen_by(sample, 0)).count;
    tiles += count, parts += std::min(count, x.splits);
  }
  tiles *= x.kv_heads * ceil_div(group, kWarpRows);
  const int64_t of_eight = 8 % group == 0 || group % 8 == 0 ? kSector : 2 * kSector;
  const int64_t eights = int64_t{x.samples} * x.kv_heads * ceil_div(group, 8) * of_eight;
  const int64_t merged = x.splits == 1 ? 0 : x.splits * (2 * row + 2 * kSector) + row + kSector;
  const int64_t bytes = x.heads * parts * row + 2 * tiles * kKeys * row +
                        x.splits * (rows * 2 * row + eights) + rows * merged +
                        bytes_of_begins(x, x.splits * blocks_of(x));
  return {bytes, 4 * tiles * kWarpRows * kKeys * x.width, x.splits * blocks_of(x)};
}

/// To the kernel the heads that share keys are rows, one beside the other.
void run(const Queue& queue, const Problem<bf16>& p) {
  const int64_t rows = int64_t{p.samples} * p.heads;
  Problem<bf16> parts = p;
  parts.of_q.row = parts.of_out.row = p.width;
  if (p.splits > 1) {
    parts.wide_out = p.scratch;
    parts.of_out.sample = int64_t{p.heads} * p.width;
    parts.lse = p.scratch + p.splits * rows * p.width;
  }
  with_width(p.width, [&](auto width) {
    launch(kernel<width>,
           {{blocks_of(p), p.splits}, kWarp, (kWarpRows + 2 * kStages * kKeys) * width * 2}, queue,
           parts);
    if (p.splits == 1) return;
    launch(merge_kernel<width>, ceil_div(rows * kWarp, kThreads), kThreads, 0, queue, p);
  });
}

}  // namespace

int splits_of(const Shape& x, int multiprocessors) {
  const int64_t wanted = ceil_div(int64_t{kBlocksHeld} * multiprocessors, blocks_of(x));
  const int64_t most = std::max<int64_t>(x.keys / (kLeastTiles * kKeys), 1);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, most));
}

const Rung<bf16> kFlashDecode{
    "flash_decode", "one query, keys split over blocks", 80, kWarpRows, kKeys, cost, run};

}  // namespace usp::attention
