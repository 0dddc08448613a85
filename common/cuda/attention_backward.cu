#include <cmath>

#include "cuda/attention_tiles.h"

/// Blockwise attention, backward, from each row's log-sum-exp and delta. The gradients of queries
/// and those of keys and values have a kernel each, and both compute the probabilities anew: seven
/// products instead of five. In return each gradient is summed by one warp, in a fixed order, where
/// a single kernel would add to dq by atomics.
namespace usp::cuda {

namespace {

/// Shared memory for the block's rows and a tile, of two tensors, and `kinds` weights of each warp.
template <class A>
int64_t bytes_of_block(int kinds, int64_t D) {
  return static_cast<int64_t>(sizeof(A)) *
         (2 * (kBlockRows + kTile) * row_stride(D) + kinds * kBlockWarps * kTile * kRows);
}

/// The probability of a key, and the gradient of its score. A NaN that the mask hides stays hidden.
template <class A>
struct Weight {
  A prob, dscore;

  __device__ Weight(bool seen, A score, A dprob, A lse, A delta, A scale)
      : prob(seen ? std::exp(score * scale - lse) : 0),
        dscore(seen ? prob * (dprob - delta) * scale : 0) {}
};

/// dq = or += dscores k. A block has 16 queries of one head, and reads keys and values as forward
/// does; besides, q and dout, 2 sizeof(T) bytes a channel, and dq out, sizeof(O), or in and out.
/// The two numbers of a row are read for each tile, from a cache.
/// Differentiates forward_kernel's `add_weighted<C>(result, weights, values, D)` by the weights,
/// and their scores by q.
template <class T, class O, int C>
__global__ void dq_kernel(AttentionGradients<T, O> g, AttentionProblem<T> p,
                          int64_t blocks_per_head) {
  using A = accumulate_t<T>;
  const int D = static_cast<int>(p.D), stride = row_stride(D);
  A* queries = dynamic_shared<A>();
  A *douts = queries + kBlockRows * stride, *keys = douts + kBlockRows * stride;
  A *values = keys + kTile * stride, *weights = values + kTile * stride + warp() * kTile * kRows;
  const int64_t head = blockIdx.x / blocks_per_head, b = head / p.N, n = head % p.N;
  const int64_t kv = n / (p.N / p.G), block_row = blockIdx.x % blocks_per_head * kBlockRows;
  const int64_t first = block_row + warp() * kRows;
  const Window any = window_of_block(p, b, block_row);
  load_rows(queries, kBlockRows, p.q, b, n, block_row, p.S, D);
  load_rows(douts, kBlockRows, g.dout, b, n, block_row, p.S, D);
  A result[kRows][C] = {};
  for (int64_t tile = 0; tile < p.K; tile += kTile) {
    const int64_t key = position_of(p.keys, tile + lane(), kNever);
    if (sees_none(any, key)) continue;
    __syncthreads();  // the tile before has been used
    load_rows(keys, kTile, p.k, b, kv, tile, p.K, D);
    load_rows(values, kTile, p.v, b, kv, tile, p.K, D);
    __syncthreads();
    A score[kRows], dprob[kRows];
    multiply_rows(score, queries + warp() * kRows * stride, keys, D);
    multiply_rows(dprob, douts + warp() * kRows * stride, values, D);
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = head * p.S + (first + r < p.S ? first + r : 0);
      const Weight<A> weight(window_of(p, b, first + r).holds(key), score[r], dprob[r], g.lse[row],
                             g.delta[row], static_cast<A>(p.scale));
      weights[lane() * kRows + r] = weight.dscore;
    }
    __syncwarp();
    add_weighted<C>(result, weights, keys, D);
  }
  leave_rows(g.dq, b, first, p.S, n, result, D, g.accumulate);
}

/// dk = or += dscoresᵀ q and dv = or += probsᵀ dout. A block has 16 keys of one kv head and meets
/// the queries of every head that reads it: 2 sizeof(T) D bytes a query and head, K / 16 times in
/// all, and its log-sum-exp and delta for each warp. Its keys, values and their gradients it meets
/// once.
/// Differentiates forward_kernel's `add_weighted<C>(result, weights, values, D)` by both factors,
/// and the weights' scores by k.
template <class T, class O, int C>
__global__ void dkv_kernel(AttentionGradients<T, O> g, AttentionProblem<T> p,
                           int64_t blocks_per_head) {
  using A = accumulate_t<T>;
  const int D = static_cast<int>(p.D), stride = row_stride(D);
  A* keys = dynamic_shared<A>();
  A *values = keys + kBlockRows * stride, *queries = values + kBlockRows * stride;
  A *douts = queries + kTile * stride, *probs = douts + kTile * stride + warp() * kTile * kRows;
  A* dscores = probs + kBlockWarps * kTile * kRows;
  const int64_t kv = blockIdx.x / blocks_per_head % p.G, b = blockIdx.x / blocks_per_head / p.G;
  const int64_t group = p.N / p.G, block_row = blockIdx.x % blocks_per_head * kBlockRows;
  const int64_t first = block_row + warp() * kRows;
  const int64_t own = lane() < kBlockRows ? block_row + lane() : p.K;  // a key a lane
  const int64_t earliest = -warp_max(-position_of(p.keys, own, kNever));
  const int64_t latest = warp_max(position_of(p.keys, own, kBeforeAll));
  int64_t position[kRows];
  for (int r = 0; r < kRows; ++r) position[r] = position_of(p.keys, first + r, kNever);
  load_rows(keys, kBlockRows, p.k, b, kv, block_row, p.K, D);
  load_rows(values, kBlockRows, p.v, b, kv, block_row, p.K, D);
  A dk[kRows][C] = {}, dv[kRows][C] = {};
  for (int64_t n = kv * group; n < (kv + 1) * group; ++n) {
    for (int64_t tile = 0; tile < p.S; tile += kTile) {
      const Window seen = window_of(p, b, tile + lane());
      if (warp_max(seen.to) < earliest) continue;  // nobody sees any
      if (p.begins != nullptr && -warp_max(-seen.from) > latest) continue;
      __syncthreads();  // the tile before has been used
      load_rows(queries, kTile, p.q, b, n, tile, p.S, D);
      load_rows(douts, kTile, g.dout, b, n, tile, p.S, D);
      __syncthreads();
      A score[kRows], dprob[kRows];
      multiply_rows(score, keys + warp() * kRows * stride, queries, D);
      multiply_rows(dprob, values + warp() * kRows * stride, douts, D);
      const int64_t row = (b * p.N + n) * p.S + (tile + lane() < p.S ? tile + lane() : 0);
      const A lse = g.lse[row], delta = g.delta[row];
      for (int r = 0; r < kRows; ++r) {
        const Weight<A> weight(seen.holds(position[r]), score[r], dprob[r], lse, delta,
                               static_cast<A>(p.scale));
        probs[lane() * kRows + r] = weight.prob;
        dscores[lane() * kRows + r] = weight.dscore;
      }
      __syncwarp();
      add_weighted<C>(dk, dscores, queries, D);
      add_weighted<C>(dv, probs, douts, D);
    }
  }
  leave_rows(g.dk, b, first, p.K, kv, dk, D, g.accumulate);
  leave_rows(g.dv, b, first, p.K, kv, dv, D, g.accumulate);
}

}  // namespace

template <class T, class O>
int64_t AttentionGradients<T, O>::shared_bytes(int64_t D) {
  return bytes_of_block<A>(2, D);
}

template <class T, class O>
void AttentionGradients<T, O>::backward(cudaStream_t stream, const AttentionProblem<T>& p) const {
  const int64_t query_blocks = ceil_div(p.S, kBlockRows), key_blocks = ceil_div(p.K, kBlockRows);
  with_channels(p.D, [&](auto channels) {
    launch(dq_kernel<T, O, channels>, p.B * p.N * query_blocks, kBlockWarps * kWarp,
           bytes_of_block<A>(1, p.D), stream, *this, p, query_blocks);
    launch(dkv_kernel<T, O, channels>, p.B * p.G * key_blocks, kBlockWarps * kWarp,
           shared_bytes(p.D), stream, *this, p, key_blocks);
  });
}

template struct AttentionGradients<float, float>;
template struct AttentionGradients<double, double>;
template struct AttentionGradients<bf16, bf16>;
template struct AttentionGradients<bf16, float>;

}  // namespace usp::cuda
