#include <cmath>

#include "cuda/attention_tiles.h"

/// Blockwise attention, forward: of a head's scores no more than a tile exists at a time, and none
/// of them goes to memory. Dao et al. (2022), https://arxiv.org/abs/2205.14135.
namespace usp::cuda {

namespace {

/// Shared memory for `rows` rows, and for the weights of every warp, in bytes.
template <class A>
int64_t shared_bytes(int rows, int64_t D) {
  return static_cast<int64_t>(sizeof(A)) * (rows * row_stride(D) + kBlockWarps * kTile * kRows);
}

/// A block has 16 queries of one head. It reads them once, and writes their outputs once; it reads
/// the keys and values that any of them sees: 2 sizeof(T) D bytes a key, S / 16 times in all,
/// mostly from the L2 cache, because the blocks of a head run at about the same time.
template <class T, class O, int C>
__global__ void forward_kernel(Heads<O> out, accumulate_t<T>* lse, AttentionProblem<T> p,
                               int64_t blocks_per_head) {
  using A = accumulate_t<T>;
  const int D = static_cast<int>(p.D);
  A* queries = dynamic_shared<A>();
  A* keys = queries + kBlockRows * row_stride(D);
  A* values = keys + kTile * row_stride(D);
  A* weights = values + kTile * row_stride(D) + warp() * kTile * kRows;
  const int64_t head = blockIdx.x / blocks_per_head, b = head / p.N, n = head % p.N;
  const int64_t kv = n / (p.N / p.G), block_row = blockIdx.x % blocks_per_head * kBlockRows;
  const int64_t first = block_row + warp() * kRows;
  const Window any = window_of_block(p, b, block_row);
  Window seen[kRows];
  A max[kRows], sum[kRows], result[kRows][C] = {};
  for (int r = 0; r < kRows; ++r) {
    seen[r] = window_of(p, b, first + r);
    max[r] = -kInfinity<A>;
    sum[r] = 0;  // of this lane's keys
  }
  load_rows(queries, kBlockRows, p.q, b, n, block_row, p.S, D);
  for (int64_t tile = 0; tile < p.K; tile += kTile) {
    const int64_t key = position_of(p.keys, tile + lane(), kNever);
    if (sees_none(any, key)) continue;
    __syncthreads();  // the tile before has been used
    load_rows(keys, kTile, p.k, b, kv, tile, p.K, D);
    load_rows(values, kTile, p.v, b, kv, tile, p.K, D);
    __syncthreads();
    A score[kRows];
    multiply_rows(score, queries + warp() * kRows * row_stride(D), keys, D);
    for (int r = 0; r < kRows; ++r) {
      const A s = seen[r].holds(key) ? score[r] * static_cast<A>(p.scale) : -kInfinity<A>;
      const A new_max = Larger<A>()(max[r], warp_max(s)), shift = SoftmaxSum<A>::shift(new_max);
      const A weight = std::exp(s - shift), correction = std::exp(max[r] - shift);
      max[r] = new_max;
      sum[r] = sum[r] * correction + weight;
      for (int c = 0; c < C; ++c) result[r][c] *= correction;
      weights[lane() * kRows + r] = weight;
    }
    __syncwarp();
    add_weighted<C>(result, weights, values, D);
  }
  for (int r = 0; r < kRows; ++r) {
    const A total = warp_sum(sum[r]), inverse = total == 0 ? 0 : 1 / total;
    if (first + r >= p.S) continue;
    if (lane() == 0) lse[head * p.S + first + r] = max[r] + std::log(total);
    for (int c = 0; c < C; ++c) {
      const int d = lane() + c * kWarp;
      if (d < D) store(out.at(b, first + r, n)[d], result[r][c] * inverse);
    }
  }
}

/// A warp a row of D channels: reads both outputs and writes one, 3 sizeof(A) bytes a channel.
/// Every lane reads the row's two log-sum-exps, one lane writes the merged one.
template <class A>
__global__ void merge_kernel(Heads<A> out, A* lse, Heads<const A> part_out, const A* part_lse,
                             int64_t rows, int64_t S, int64_t N, int D) {
  const int64_t row = warp_of_grid(), b = row / (S * N), s = row / N % S, n = row % N;
  if (row >= rows) return;
  const int64_t i = (b * N + n) * S + s;
  const A own_lse = lse[i], other_lse = part_lse[i];
  SoftmaxSum<A> both;
  both.add(own_lse, A{1});
  both.add(other_lse, A{1});
  const A shift = SoftmaxSum<A>::shift(both.max), inverse = both.sum == 0 ? 0 : 1 / both.sum;
  const A own = std::exp(own_lse - shift) * inverse, other = std::exp(other_lse - shift) * inverse;
  A* x = out.at(b, s, n);
  const A* y = part_out.at(b, s, n);
  for (int d = lane(); d < D; d += kWarp) x[d] = own * x[d] + other * y[d];
  __syncwarp();  // every lane has read the row's log-sum-exp
  if (lane() == 0) lse[i] = both.max + std::log(both.sum);
}

/// A warp a row of D channels of both: 2 sizeof(T) bytes a channel.
template <class T>
__global__ void delta_kernel(accumulate_t<T>* delta, Heads<const T> dout, Heads<const T> out,
                             int64_t rows, int64_t S, int64_t N, int D) {
  const int64_t row = warp_of_grid(), b = row / (S * N), s = row / N % S, n = row % N;
  if (row >= rows) return;
  const T *x = dout.at(b, s, n), *y = out.at(b, s, n);
  accumulate_t<T> sum = 0;
  for (int d = lane(); d < D; d += kWarp) sum += load(x[d]) * load(y[d]);
  sum = warp_sum(sum);
  if (lane() == 0) delta[(b * N + n) * S + s] = sum;
}

}  // namespace

template <class T, class O>
void Attention<T, O>::forward(cudaStream_t stream, const Heads<O>& out, A* lse,
                              const AttentionProblem<T>& p) {
  const int64_t blocks_per_head = ceil_div(p.S, kBlockRows);
  with_channels(p.D, [&](auto channels) {
    launch(forward_kernel<T, O, channels>, p.B * p.N * blocks_per_head, kBlockWarps * kWarp,
           shared_bytes<A>(kBlockRows + 2 * kTile, p.D), stream, out, lse, p, blocks_per_head);
  });
}

template <class A>
void AttentionParts<A>::merge(cudaStream_t stream, const Heads<A>& out, A* lse,
                              const Heads<const A>& part_out, const A* part_lse, int64_t B,
                              int64_t S, int64_t N, int64_t D) {
  const int64_t rows = B * S * N;
  launch(merge_kernel<A>, ceil_div(rows * kWarp, kThreads), kThreads, 0, stream, out, lse, part_out,
         part_lse, rows, S, N, static_cast<int>(D));
}

template <class T>
void AttentionDelta<T>::run(cudaStream_t stream, A* delta, const Heads<const T>& dout,
                            const Heads<const T>& out, int64_t B, int64_t S, int64_t N, int64_t D) {
  const int64_t rows = B * S * N;
  launch(delta_kernel<T>, ceil_div(rows * kWarp, kThreads), kThreads, 0, stream, delta, dout, out,
         rows, S, N, static_cast<int>(D));
}

template struct Attention<float, float>;
template struct Attention<double, double>;
template struct Attention<bf16, bf16>;
template struct Attention<bf16, float>;
template struct AttentionParts<float>;
template struct AttentionParts<double>;
template struct AttentionDelta<float>;
template struct AttentionDelta<double>;
template struct AttentionDelta<bf16>;

}  // namespace usp::cuda
