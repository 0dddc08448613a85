#include <cmath>

#include "cuda/kernels.h"
#include "cuda/reduce.h"

/// The norm of all gradients, and AdamW. What the norm decides stays on the GPU: the host never
/// waits for it.
namespace usp::cuda {

namespace {

constexpr int64_t kElementsPerSum = 16384;  ///< of one partial sum of squares

/// The range that this block works on: the last that begins at it or before.
template <class Ranges>
__device__ int range_of_block(const Ranges& ranges) {
  int at = 0, end = ranges.size;
  while (end - at > 1) {
    const int middle = (at + end) / 2;
    (ranges.of[middle].first_block <= int64_t{blockIdx.x} ? at : end) = middle;
  }
  return at;
}

/// A block has kElementsPerSum elements of a range, a thread every 256th of them: sizeof(T) bytes
/// an element.
template <class T>
__global__ void partial_squares_kernel(double* partial, const __grid_constant__
                                       typename SumSquares<T>::Ranges ranges) {
  const auto& [x, count, first_block] = ranges.of[range_of_block(ranges)];
  const int64_t begin = (blockIdx.x - first_block) * kElementsPerSum;
  const int64_t end = begin + kElementsPerSum < count ? begin + kElementsPerSum : count;
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const auto element = static_cast<double>(load(x[i]));
    sum += element * element;
  }
  __shared__ double of_warps[kWarp];
  sum = block_sum(sum, of_warps);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/// One block adds up the partial sums, 8 bytes each.
__global__ void add_squares_kernel(double* sum, const double* partial, int64_t count,
                                   bool accumulate) {
  double mine = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) mine += partial[i];
  __shared__ double of_warps[kWarp];
  mine = block_sum(mine, of_warps);
  if (threadIdx.x == 0) *sum = accumulate ? *sum + mine : mine;
}

/// One thread, 8 bytes a sum: there are a few.
__global__ void clip_kernel(double* coefficient, double* norm, const double* sums, int64_t count,
                            double max_norm) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += sums[i];
  const double length = std::sqrt(sum);
  double factor = 1;
  if (max_norm > 0 && length > max_norm) factor = max_norm / length;
  if (!(length < kInfinity<double>)) factor = std::numeric_limits<double>::quiet_NaN();
  *norm = length;
  *coefficient = factor;
}

/// W elements a thread. Of bf16 weights with gradients in f32, an element costs 30 bytes: it reads
/// gradient, m, v and master, 16 bytes, and writes m, v, master and value, 14. A coefficient of NaN
/// says that the gradients are not finite: then nothing is written.
template <class T, class G, int W>
__global__ void adamw_kernel(const __grid_constant__ typename AdamW<T, G>::Ranges ranges,
                             const double* coefficient, AdamWFactors<accumulate_t<T>> f) {
  using A = accumulate_t<T>;
  const auto& [value, master, m, v, grad, count, keep, first_block] =
      ranges.of[range_of_block(ranges)];
  const int64_t i = ((blockIdx.x - first_block) * blockDim.x + threadIdx.x) * W;
  const double factor = *coefficient;
  if (i >= count || factor != factor) return;
  const A clip = static_cast<A>(factor);
  const auto gradient = load_pack<W>(grad + i);
  auto mean = load_pack<W>(m + i), variance = load_pack<W>(v + i);
  auto weight = load_pack<W>(master + i);
  for (int w = 0; w < W; ++w) {
    const A g = gradient[w] * clip;
    mean[w] = f.beta1 * mean[w] + f.fresh1 * g;
    variance[w] = f.beta2 * variance[w] + f.fresh2 * g * g;
    const A step = mean[w] * f.unbias1 / (std::sqrt(variance[w] * f.unbias2) + f.eps);
    weight[w] = weight[w] * keep - f.lr * step;
  }
  store_pack(m + i, mean);
  store_pack(v + i, variance);
  store_pack(master + i, weight);
  if constexpr (!std::is_same_v<T, A>) store_pack(value + i, weight);
}

}  // namespace

int64_t sum_squares_partial_sums(int64_t count) { return ceil_div(count, kElementsPerSum); }

template <class T>
void SumSquares<T>::run(cudaStream_t stream, double* sum, double* partial,
                        std::span<const Range> ranges, bool accumulate) {
  Ranges together{};
  const auto start = [&] {
    launch(partial_squares_kernel<T>, together.blocks, kThreads, 0, stream, partial, together);
    launch(add_squares_kernel, 1, kThreads, 0, stream, sum, partial, together.blocks, accumulate);
    accumulate = true;
    together = {};
  };
  for (const Range& range : ranges) {
    if (!together.add(range, sum_squares_partial_sums(range.count))) start();
  }
  if (together.size > 0) start();
}

void clip_coefficient(cudaStream_t stream, double* coefficient, double* norm, const double* sums,
                      int64_t count, double max_norm) {
  launch(clip_kernel, 1, 1, 0, stream, coefficient, norm, sums, count, max_norm);
}

template <class T, class G>
void AdamW<T, G>::run(cudaStream_t stream, std::span<const Range> ranges, const double* coefficient,
                      const AdamWFactors<A>& factors) {
  Ranges wide{}, narrow{};  // narrow: what is not aligned, an element at a time
  const auto start = [&](auto width, Ranges& together) {
    launch(adamw_kernel<T, G, width>, together.blocks, kThreads, 0, stream, together, coefficient,
           factors);
    together = {};
  };
  for (const Range& range : ranges) {
    with_width<A>(range.count, {range.value, range.master, range.m, range.v, range.grad},
                  [&](auto width) {
                    Ranges& together = width == 1 ? narrow : wide;
                    const int64_t blocks = ceil_div(range.count, int64_t{kThreads} * width);
                    if (!together.add(range, blocks)) start(width, together);
                  });
  }
  start(std::integral_constant<int, kWide<A>>{}, wide);
  start(std::integral_constant<int, 1>{}, narrow);
}

template struct SumSquares<float>;
template struct SumSquares<double>;
template struct SumSquares<bf16>;
template struct AdamW<float, float>;
template struct AdamW<double, double>;
template struct AdamW<bf16, float>;
template struct AdamW<bf16, bf16>;

}  // namespace usp::cuda
