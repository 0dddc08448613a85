#include "warps.h"

/// Tensor cores of a warp. Each of eight warps has 16 queries, and all of them the same keys: so no
/// warp needs another's numbers, neither for a row's maximum nor for its output. The next tile of
/// keys and values comes meanwhile.
namespace usp::attention {

namespace {

using namespace cuda;

constexpr int kKeys = 64, kStages = 2;

/// Shared memory of a block: queries, stages of keys and of values.
template <int width, int value_width, int queries>
constexpr int kBytes = (queries * width + kStages * kKeys * (width + value_width)) * 2;
static_assert(kBytes<kWidestKeys, kWidestValues, kOwnRows> <= kSharedOfWidest);

/// Threads of a block.
template <int queries>
constexpr int kBlock = queries / kWarpRows* kWarp;

/// `own`: queries that a block keeps.
template <int width, int value_width, int own>
__global__ void __launch_bounds__(kBlock<own>, 1) kernel(Problem<bf16> p) {
  if constexpr (!has_shared(kBytes<width, value_width, own>)) return;
  constexpr int kTile = kKeys * width * 2, kStage = kTile + kKeys * value_width * 2;
  char* const queries = swizzled_shared();
  char* const stages = queries + own * width * 2;
  const Turn turn = p.turn(static_cast<int>(blockIdx.x), own);
  const Head<bf16> head(p, turn.head);
  const int top = turn.first;
  const int warp_top = top + warp() * kWarpRows, row = warp_top + lane() / 4;
  const Stretch seen[2] = {p.seen_by(head.sample, row), p.seen_by(head.sample, row + 8)};
  const Stretch seen_by_all = p.seen_by_all(head.sample, warp_top, kWarpRows);
  const Tiles tiles = p.tiles_seen(head.sample, top, own, kKeys);
  const auto bring_tile = [&](int step) {
    char* const stage = stages + step % kStages * kStage;
    if (step < tiles.count) {
      const int first = tiles[step] * kKeys;
      bring<width, kKeys, kBlock<own>>(stage, head.k, head.k_pitch, first, p.keys);
      bring<value_width, kKeys, kBlock<own>>(stage + kTile, head.v, head.v_pitch, first, p.keys);
    }
    cp_async_commit();
  };
  OnlineSoftmax softmax;
  float s[kKeys / 2], o[value_width / 2] = {};
  if (tiles.count > 0) {
    bring<width, own, kBlock<own>>(queries, head.q, head.pitch, top, p.queries);
  }
  bring_tile(0);
  for (int step = 0; step < tiles.count; ++step) {
    const int first = tiles[step] * kKeys;
    const char* const stage = stages + step % kStages * kStage;
    bring_tile(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    multiply<width, own>(s, queries, stage);
    if (!seen_by_all.holds(first, first + kKeys)) mask(s, first + lane() % 4 * 2, seen);
    softmax.take(s, p.scale * kLog2e);
    USP_UNROLL
    for (int i = 0; i < value_width / 2; ++i) o[i] *= softmax.factor[i / 2 % 2];
    add_weighted(o, s, stage + kTile);
    __syncthreads();
  }
  finish(p, head, row, p.queries, softmax, o);
  if constexpr (value_width < width) pad<width - value_width>(p, head, row);
}

template <int own>
Cost cost(const Shape& x) {
  return cost_of(x, own, kKeys, own / kWarpRows);
}

template <int own, int width, int value_width>
void run_at(const Queue& queue, const Problem<bf16>& p) {
  launch(kernel<width, value_width, own>, ceil_div(p.queries, own) * p.samples * p.heads,
         kBlock<own>, kBytes<width, value_width, own>, queue, p);
}

void run(const Queue& queue, const Problem<bf16>& p) {
  with_widths(p.width, [&](auto width, auto value_width) {
    run_at<kOwnRows, width, value_width>(queue, p);
  });
}

}  // namespace

const Rung<bf16> kFlash2{"flash_2",
                         "tensor cores, queries split over warps",
                         80,
                         kOwnRows,
                         kKeys,
                         cost<kOwnRows>,
                         run,
                         /*keeps_scores=*/false,
                         kWidestKeys};
// Blocks of 64 channels alone, whose keys pass by twice, and four times, as often.
const Rung<bf16> kFlash2Of64{"flash_2", "blocks of 64 queries", 80,    64, kKeys,
                             cost<64>,  run_at<64, 64, 64>,     false, 64};
const Rung<bf16> kFlash2Of32{"flash_2", "blocks of 32 queries", 80,    32, kKeys,
                             cost<32>,  run_at<32, 64, 64>,     false, 64};

}  // namespace usp::attention
