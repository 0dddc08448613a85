#include <cmath>

#include "cuda/kernels.h"
#include "cuda/launch.h"

/// Kernels that look at each element alone. They are as fast as the memory is: what counts is that
/// neighboring threads touch neighboring addresses, and how many bytes there are to move.
namespace usp::cuda {

namespace {

/// Blocks for one thread per W elements.
template <int W>
int64_t blocks_of(int64_t count) {
  return ceil_div(count / W, kThreads);
}

/// Writes W elements a thread, sizeof(T) bytes an element.
template <class T, int W>
__global__ void fill_kernel(T* y, int64_t count, accumulate_t<T> value) {
  const int64_t i = thread_of_grid() * W;
  if (i >= count) return;
  Numbers<accumulate_t<T>, W> numbers;
  for (int w = 0; w < W; ++w) numbers[w] = value;
  store_pack(y + i, numbers);
}

/// W elements a thread: reads two and writes one, 3 sizeof(T) bytes an element.
template <class T, int W>
__global__ void add_kernel(T* y, const T* a, const T* b, int64_t count) {
  const int64_t i = thread_of_grid() * W;
  if (i >= count) return;
  auto sum = load_pack<W>(a + i);
  const auto right = load_pack<W>(b + i);
  for (int w = 0; w < W; ++w) sum[w] += right[w];
  store_pack(y + i, sum);
}

/// W elements a thread: reads x and the sum, writes the sum; of bf16 10 bytes an element.
template <class T, int W>
__global__ void accumulate_kernel(accumulate_t<T>* sum, const T* x, int64_t count) {
  const int64_t i = thread_of_grid() * W;
  if (i >= count) return;
  auto total = load_pack<W>(sum + i);
  const auto numbers = load_pack<W>(x + i);
  for (int w = 0; w < W; ++w) total[w] += numbers[w];
  store_pack(sum + i, total);
}

template <class A>
__device__ A sigmoid(A x) {
  return 1 / (1 + std::exp(-x));
}

/// A block a row, W columns a thread at a time: reads gate and up, writes y, 3 sizeof(T) bytes an
/// element of y.
template <class T, int W>
__global__ void swiglu_forward_kernel(T* y, const T* gate_up, int64_t F) {
  const T *gate = gate_up + blockIdx.x * 2 * F, *up = gate + F;
  T* y_row = y + blockIdx.x * F;
  for (int64_t i = threadIdx.x * W; i < F; i += blockDim.x * W) {
    auto numbers = load_pack<W>(gate + i);
    const auto factor = load_pack<W>(up + i);
    for (int w = 0; w < W; ++w) numbers[w] *= sigmoid(numbers[w]) * factor[w];
    store_pack(y_row + i, numbers);
  }
}

/// As forward: reads gate, up and dy, writes the gradients of gate and up, maybe in their place;
/// 5 sizeof(T) bytes an element of dy.
/// Differentiates swiglu_forward_kernel's `numbers[w] *= sigmoid(numbers[w]) * factor[w]`.
template <class T, int W>
__global__ void swiglu_backward_kernel(T* dgate_up, const T* dy, const T* gate_up, int64_t F) {
  const int64_t row = blockIdx.x * 2 * F;
  for (int64_t i = threadIdx.x * W; i < F; i += blockDim.x * W) {
    const auto g = load_pack<W>(gate_up + row + i), u = load_pack<W>(gate_up + row + F + i);
    const auto d = load_pack<W>(dy + blockIdx.x * F + i);
    Numbers<accumulate_t<T>, W> dgate, dup;
    for (int w = 0; w < W; ++w) {
      const auto s = sigmoid(g[w]);
      dgate[w] = d[w] * u[w] * s * (1 + g[w] * (1 - s));
      dup[w] = d[w] * g[w] * s;
    }
    store_pack(dgate_up + row + i, dgate);
    store_pack(dgate_up + row + F + i, dup);
  }
}

/// A block a row, a thread an element at a time: 2 sizeof(T) bytes an element, and the ten rounds
/// of multiplications that draw its number.
template <class T>
__global__ void dropout_kernel(T* y, const T* x, int64_t H, double rate, RandomStream random,
                               int64_t first_row) {
  using A = accumulate_t<T>;
  const A scale = static_cast<A>(1 / (1 - rate));
  const uint64_t row = static_cast<uint64_t>(first_row + blockIdx.x);
  for (int64_t h = threadIdx.x; h < H; h += blockDim.x) {
    const bool kept = random.uniform(row, static_cast<uint64_t>(h)) >= rate;
    const int64_t i = blockIdx.x * H + h;
    store(y[i], kept ? scale * load(x[i]) : A{0});
  }
}

}  // namespace

template <class T>
void Elementwise<T>::fill(cudaStream_t stream, T* y, int64_t count, double value) {
  with_width<T>(count, {y}, [&](auto width) {
    constexpr int W = width;
    launch(fill_kernel<T, W>, blocks_of<W>(count), kThreads, 0, stream, y, count, A(value));
  });
}

template <class T>
void Elementwise<T>::add(cudaStream_t stream, T* y, const T* a, const T* b, int64_t count) {
  with_width<T>(count, {y, a, b}, [&](auto width) {
    constexpr int W = width;
    launch(add_kernel<T, W>, blocks_of<W>(count), kThreads, 0, stream, y, a, b, count);
  });
}

template <class T>
void Elementwise<T>::accumulate(cudaStream_t stream, A* sum, const T* x, int64_t count) {
  with_width<A>(count, {sum, x}, [&](auto width) {
    constexpr int W = width;
    launch(accumulate_kernel<T, W>, blocks_of<W>(count), kThreads, 0, stream, sum, x, count);
  });
}

template <class T>
void Elementwise<T>::swiglu_forward(cudaStream_t stream, T* y, const T* gate_up, int64_t rows,
                                    int64_t F) {
  with_width<T>(F, {y, gate_up}, [&](auto width) {
    launch(swiglu_forward_kernel<T, width>, rows, kThreads, 0, stream, y, gate_up, F);
  });
}

template <class T>
void Elementwise<T>::swiglu_backward(cudaStream_t stream, T* dgate_up, const T* dy,
                                     const T* gate_up, int64_t rows, int64_t F) {
  with_width<T>(F, {dgate_up, dy, gate_up}, [&](auto width) {
    launch(swiglu_backward_kernel<T, width>, rows, kThreads, 0, stream, dgate_up, dy, gate_up, F);
  });
}

template <class T>
void Elementwise<T>::dropout(cudaStream_t stream, T* y, const T* x, int64_t rows, int64_t H,
                             double rate, const RandomStream& random, int64_t first_row) {
  launch(dropout_kernel<T>, rows, kThreads, 0, stream, y, x, H, rate, random, first_row);
}

template struct Elementwise<float>;
template struct Elementwise<double>;
template struct Elementwise<bf16>;

}  // namespace usp::cuda
