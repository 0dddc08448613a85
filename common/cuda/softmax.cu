#include <cmath>

#include "cuda/kernels.h"
#include "cuda/reduce.h"

/// The softmax of naive attention, whose scores lie in memory as [B, N, S, K]. A warp has a row,
/// one query of one head. probs may be scores: an element's thread reads it before it writes it.
namespace usp::cuda {

namespace {

constexpr int kRowsPerBlock = kThreads / kWarp;

/// Reads the keys that the query sees twice, the second time from a cache for rows of a few
/// thousand, and writes the whole row, zeros where it sees nothing: up to 2 sizeof(T) bytes an
/// element. Neighboring lanes have neighboring keys.
template <class T>
__global__ void forward_kernel(T* probs, accumulate_t<T>* lse, const T* scores,
                               accumulate_t<T> scale, Positions queries, Positions keys,
                               const int32_t* begins, int64_t rows, int64_t heads) {
  using A = accumulate_t<T>;
  const int64_t row = warp_of_grid(), S = queries.count(), K = keys.count();
  if (row >= rows) return;
  const int64_t s = row % S, query = queries[s];
  const int64_t begin = begins == nullptr ? 0 : begins[row / (heads * S) * S + s];
  const T* x = scores + row * K;
  SoftmaxSum<A> mine;
  for (int64_t i = lane(); i < K; i += kWarp) {
    if (begin <= keys[i] && keys[i] <= query) mine.add(load(x[i]) * scale);
  }
  const SoftmaxSum<A> all = warp_softmax_sum(mine);
  const A shift = SoftmaxSum<A>::shift(all.max), inverse = all.sum == 0 ? 0 : 1 / all.sum;
  for (int64_t i = lane(); i < K; i += kWarp) {
    const bool seen = begin <= keys[i] && keys[i] <= query;
    store(probs[row * K + i], seen ? std::exp(load(x[i]) * scale - shift) * inverse : A{0});
  }
  if (lane() == 0) lse[row] = all.max + std::log(all.sum);
}

/// A warp a row, W keys a lane at a time: reads dprobs and probs, writes dscores, maybe in the
/// place of dprobs; 3 sizeof(T) bytes an element.
/// Differentiates forward_kernel's `std::exp(load(x[i]) * scale - shift) * inverse`.
template <class T, int W>
__global__ void backward_kernel(T* dscores, const T* dprobs, const T* probs,
                                const accumulate_t<T>* delta, accumulate_t<T> scale, int64_t rows,
                                int64_t K) {
  const int64_t row = warp_of_grid();
  if (row >= rows) return;
  const accumulate_t<T> delta_of_row = delta[row];
  for (int64_t i = row * K + lane() * W; i < (row + 1) * K; i += kWarp * W) {
    auto numbers = load_pack<W>(dprobs + i);
    const auto p = load_pack<W>(probs + i);
    for (int w = 0; w < W; ++w) numbers[w] = p[w] * (numbers[w] - delta_of_row) * scale;
    store_pack(dscores + i, numbers);
  }
}

/// A warp a row, W keys a lane at a time: reads and writes probs, 2 sizeof(T) bytes an element.
template <class T, int W>
__global__ void rescale_kernel(T* probs, const accumulate_t<T>* part_lse,
                               const accumulate_t<T>* lse, int64_t rows, int64_t K) {
  using A = accumulate_t<T>;
  const int64_t row = warp_of_grid();
  if (row >= rows) return;
  const A of_part = part_lse[row];
  const A factor = of_part == -kInfinity<A> ? 0 : std::exp(of_part - lse[row]);
  for (int64_t i = row * K + lane() * W; i < (row + 1) * K; i += kWarp * W) {
    auto numbers = load_pack<W>(probs + i);
    for (int w = 0; w < W; ++w) numbers[w] *= factor;
    store_pack(probs + i, numbers);
  }
}

}  // namespace

template <class T>
void CausalSoftmax<T>::forward(cudaStream_t stream, T* probs, A* lse, const T* scores, double scale,
                               const Positions& queries, const Positions& keys,
                               const int32_t* begins, int64_t rows, int64_t heads) {
  launch(forward_kernel<T>, ceil_div(rows, kRowsPerBlock), kThreads, 0, stream, probs, lse, scores,
         A(scale), queries, keys, begins, rows, heads);
}

template <class T>
void CausalSoftmax<T>::backward(cudaStream_t stream, T* dscores, const T* dprobs, const T* probs,
                                const A* delta, double scale, int64_t rows, int64_t K) {
  with_width<T>(K, {dscores, dprobs, probs}, [&](auto width) {
    launch(backward_kernel<T, width>, ceil_div(rows, kRowsPerBlock), kThreads, 0, stream, dscores,
           dprobs, probs, delta, A(scale), rows, K);
  });
}

template <class T>
void CausalSoftmax<T>::rescale(cudaStream_t stream, T* probs, const A* part_lse, const A* lse,
                               int64_t rows, int64_t K) {
  with_width<T>(K, {probs}, [&](auto width) {
    launch(rescale_kernel<T, width>, ceil_div(rows, kRowsPerBlock), kThreads, 0, stream, probs,
           part_lse, lse, rows, K);
  });
}

template struct CausalSoftmax<float>;
template struct CausalSoftmax<double>;
template struct CausalSoftmax<bf16>;

}  // namespace usp::cuda
