#include "rows.h"

/// Three kernels: scores, their softmax, weights by values. Scores and weights lie in memory, where
/// a head has queries x keys of them, seen or not.
namespace usp::attention {

namespace {

using namespace cuda;

template <int width>
__global__ void __launch_bounds__(kBlock) scores_kernel(Problem<float> p) {
  float* const queries = dynamic_shared<float>();
  float* const keys = queries + kElements<width>;
  const Head<float> head(p, static_cast<int>(blockIdx.z));
  const int top = static_cast<int>(blockIdx.y) * kTile, side = static_cast<int>(blockIdx.x) * kTile;
  bring<width>(queries, head.q, head.pitch, top, p.queries);
  bring<width>(keys, head.k, head.k_pitch, side, p.keys);
  __syncthreads();
  float score[kRows];
  multiply<width>(score, queries, keys);
  const int row = top + first_row(), key = side + lane();
  for (int r = 0; r < kRows; ++r) {
    if (row + r >= p.queries || key >= p.keys) continue;
    const bool seen = p.seen_by(head.sample, row + r).holds(key, key + 1);
    head.scores[int64_t{row + r} * p.keys + key] = seen ? score[r] * p.scale : -kInfinity<float>;
  }
}

/// A warp a row: once over it for its maximum and its sum, once more for the weights.
__global__ void __launch_bounds__(kBlock) softmax_kernel(Problem<float> p) {
  const int64_t row = warp_of_grid();
  if (row >= int64_t{p.samples} * p.heads * p.queries) return;
  float* const x = p.scratch + row * p.keys;
  SoftmaxSum<float> own;
  for (int i = lane(); i < p.keys; i += kWarp) own.add(x[i]);
  const SoftmaxSum<float> all = warp_softmax_sum(own);
  const float shift = all.shift(all.max), inverse = all.sum == 0 ? 0 : 1 / all.sum;
  for (int i = lane(); i < p.keys; i += kWarp) x[i] = std::exp(x[i] - shift) * inverse;
  if (lane() == 0) p.lse[row] = all.max + std::log(all.sum);
}

template <int width>
__global__ void __launch_bounds__(kBlock, 1) values_kernel(Problem<float> p) {
  float* const weights = dynamic_shared<float>();
  float* const values = weights + kTile * kTile;
  const Head<float> head(p, static_cast<int>(blockIdx.y));
  const int top = static_cast<int>(blockIdx.x) * kTile, row = top + first_row();
  float result[kRows][width / kTile] = {};
  for (int first = 0; first < p.keys; first += kTile) {
    const bool inside = first + lane() < p.keys;
    for (int r = 0; r < kRows; ++r) {
      weights[(first_row() + r) * kTile + lane()] =
          inside && row + r < p.queries ? head.scores[int64_t{row + r} * p.keys + first + lane()]
                                        : 0;
    }
    bring<width>(values, head.v, head.v_pitch, first, p.keys);
    __syncthreads();
    add_weighted<width>(result, weights + first_row() * kTile, values);
    __syncthreads();
  }
  for (int r = 0; r < kRows && row + r < p.queries; ++r) {
    float* const out = head.out + int64_t{row + r} * head.out_pitch + lane();
    for (int c = 0; c < width / kTile; ++c) out[c * kTile] = result[r][c];
  }
}

/// Scores are written, read twice and written as weights, and read again. For each tile of them
/// rows of q and k are read, with documents their begins, and of v once.
Cost cost(const Shape& x) {
  const int64_t down = ceil_div(x.queries, kTile), across = ceil_div(x.keys, kTile);
  const int64_t scores = (kTile * int64_t{sizeof(float)} + (x.keys % 8 == 0 ? 0 : kSector)) *
                         across * x.queries;  // a row may begin within a sector
  const int64_t head = (3 * down * across + down) * kTile * x.width * int64_t{sizeof(float)} +
                       5 * scores + int64_t{x.queries} * kSector +
                       bytes_of_begins(x, x.queries * across);
  const int64_t heads = int64_t{x.samples} * x.heads;
  return {heads * head, heads * 4 * down * across * kTile * kTile * x.width, heads * down};
}

void run(const Queue& queue, const Problem<float>& p) {
  const int64_t heads = int64_t{p.samples} * p.heads, down = ceil_div(p.queries, kTile);
  with_width(p.width, [&](auto width) {
    constexpr int kTileBytes = kElements<width> * static_cast<int>(sizeof(float));
    launch(scores_kernel<width>, {{ceil_div(p.keys, kTile), down, heads}, kBlock, 2 * kTileBytes},
           queue, p);
    launch(softmax_kernel, ceil_div(heads * p.queries * kWarp, kBlock), kBlock, 0, queue, p);
    launch(values_kernel<width>,
           {{down, heads}, kBlock, kTileBytes + kTile * kTile * int64_t{sizeof(float)}}, queue, p);
  });
}

}  // namespace

const Rung<float> kNaive{"naive",
                         "scores and weights in memory",
                         75,
                         kTile,
                         kTile,
                         cost,
                         run,
                         /*keeps_scores=*/true};

}  // namespace usp::attention
