#include <cmath>

#include "cuda/kernels.h"
#include "cuda/reduce.h"

/// The loss of rows over a vocabulary of 10^5 tokens: a row has a block, and the logits, by far the
/// largest tensor of a step, are read once forward and once backward.
namespace usp::cuda {

namespace {

/// A block a row, W logits a thread at a time: sizeof(T) bytes a logit. Each thread has a softmax
/// of what it saw, each warp joins those of its lanes, and the first warp those of the warps.
template <class T, int W>
__global__ void forward_kernel(accumulate_t<T>* row_max, accumulate_t<T>* row_sum,
                               accumulate_t<T>* target_logit, const T* logits,
                               const int32_t* targets, int64_t V, int64_t vocab_offset) {
  using A = accumulate_t<T>;
  const int64_t row = blockIdx.x;
  const T* x = logits + row * V;
  SoftmaxSum<A> mine;
  for (int64_t i = threadIdx.x * W; i < V; i += blockDim.x * W) {
    const auto numbers = load_pack<W>(x + i);
    for (int w = 0; w < W; ++w) mine.add(numbers[w]);
  }
  mine = warp_softmax_sum(mine);
  __shared__ A max_of_warp[kWarp], sum_of_warp[kWarp];
  if (lane() == 0) {
    max_of_warp[warp()] = mine.max;
    sum_of_warp[warp()] = mine.sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int other = 1; other < static_cast<int>(blockDim.x) / kWarp; ++other) {
    mine.add(max_of_warp[other], sum_of_warp[other]);
  }
  const int64_t target = targets[row] - vocab_offset;
  row_max[row] = mine.max;
  row_sum[row] = mine.sum;
  target_logit[row] = target >= 0 && target < V ? load(x[target]) : A{0};
}

/// A thread a row: reads three numbers and writes one, sizeof(A) bytes each.
template <class A>
__global__ void rescale_kernel(A* row_sum, const A* row_max, const A* max, int64_t rows) {
  const int64_t row = thread_of_grid();
  // A shard of none but impossible tokens adds nothing, whatever the others hold.
  if (row < rows && row_sum[row] != 0) row_sum[row] *= std::exp(row_max[row] - max[row]);
}

/// One block for all rows: a thread adds every 256th, then the block its threads' sums. Of a row it
/// reads three numbers and writes one, sizeof(A) bytes each.
template <class A>
__global__ void loss_kernel(double* loss, A* lse, const A* row_max, const A* row_sum,
                            const A* target_logit, int64_t rows, double scale) {
  double sum = 0;
  for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) {
    const A log_sum = row_max[row] + std::log(row_sum[row]);
    lse[row] = log_sum;
    sum += static_cast<double>(log_sum) - static_cast<double>(target_logit[row]);
  }
  __shared__ double of_warps[kWarp];
  sum = block_sum(sum, of_warps);
  if (threadIdx.x == 0) *loss += scale * sum;
}

/// A block a row, W logits a thread at a time: reads a logit and writes its gradient, maybe in its
/// place; 2 sizeof(T) bytes a logit.
/// Differentiates loss_kernel's `row_max[row] + std::log(row_sum[row])`, and the target's logit
/// that is subtracted there.
template <class T, int W>
__global__ void backward_kernel(T* dlogits, const T* logits, const int32_t* targets,
                                const accumulate_t<T>* lse, int64_t V, int64_t vocab_offset,
                                accumulate_t<T> scale) {
  const int64_t row = blockIdx.x, target = targets[row] - vocab_offset;
  const accumulate_t<T> log_sum = lse[row];
  for (int64_t i = threadIdx.x * W; i < V; i += blockDim.x * W) {
    auto numbers = load_pack<W>(logits + row * V + i);
    for (int w = 0; w < W; ++w) {
      numbers[w] = scale * (std::exp(numbers[w] - log_sum) - (i + w == target ? 1 : 0));
    }
    store_pack(dlogits + row * V + i, numbers);
  }
}

}  // namespace

template <class T>
void CrossEntropy<T>::forward(cudaStream_t stream, A* row_max, A* row_sum, A* target_logit,
                              const T* logits, const int32_t* targets, int64_t rows, int64_t V,
                              int64_t vocab_offset) {
  with_width<T>(V, {logits}, [&](auto width) {
    launch(forward_kernel<T, width>, rows, kThreads, 0, stream, row_max, row_sum, target_logit,
           logits, targets, V, vocab_offset);
  });
}

template <class T>
void CrossEntropy<T>::backward(cudaStream_t stream, T* dlogits, const T* logits,
                               const int32_t* targets, const A* lse, int64_t rows, int64_t V,
                               int64_t vocab_offset, double scale) {
  with_width<T>(V, {dlogits, logits}, [&](auto width) {
    launch(backward_kernel<T, width>, rows, kThreads, 0, stream, dlogits, logits, targets, lse, V,
           vocab_offset, A(scale));
  });
}

template <class A>
void CrossEntropyRows<A>::rescale(cudaStream_t stream, A* row_sum, const A* row_max, const A* max,
                                  int64_t rows) {
  launch(rescale_kernel<A>, ceil_div(rows, kThreads), kThreads, 0, stream, row_sum, row_max, max,
         rows);
}

template <class A>
void CrossEntropyRows<A>::loss(cudaStream_t stream, double* loss, A* lse, const A* row_max,
                               const A* row_sum, const A* target_logit, int64_t rows,
                               double scale) {
  launch(loss_kernel<A>, 1, kThreads, 0, stream, loss, lse, row_max, row_sum, target_logit, rows,
         scale);
}

template struct CrossEntropy<float>;
template struct CrossEntropy<double>;
template struct CrossEntropy<bf16>;
template struct CrossEntropyRows<float>;
template struct CrossEntropyRows<double>;

}  // namespace usp::cuda
