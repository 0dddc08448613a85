#include <cmath>

#include "cuda/kernels.h"
#include "cuda/reduce.h"

/// RMSNorm: y = x * rstd * weight, rstd = 1 / sqrt(mean(x²) + eps). A warp has a row: its lanes
/// take packs of W columns in turn and add up what they found by shuffles, without a barrier. The
/// second look at a row finds it in the L1 cache.
namespace usp::cuda {

namespace {

constexpr int kRowsPerBlock = kThreads / kWarp;
constexpr int kRowsPerSum = 64;  ///< of one partial sum of the weight's gradient

/// Reads x and writes y: 2 sizeof(T) bytes an element, besides rstd, one number a row, and weight,
/// which stays in the caches.
template <class T, int W>
__global__ void forward_kernel(T* y, accumulate_t<T>* rstd, const T* x, const T* weight,
                               int64_t rows, int64_t H, accumulate_t<T> eps) {
  using A = accumulate_t<T>;
  const int64_t row = warp_of_grid();
  if (row >= rows) return;
  const T* x_row = x + row * H;
  T* y_row = y + row * H;
  A squares = 0;
  for (int64_t h = lane() * W; h < H; h += kWarp * W) {
    const auto numbers = load_pack<W>(x_row + h);
    for (int w = 0; w < W; ++w) squares += numbers[w] * numbers[w];
  }
  const A r = 1 / std::sqrt(warp_sum(squares) / static_cast<A>(H) + eps);
  if (lane() == 0) rstd[row] = r;
  for (int64_t h = lane() * W; h < H; h += kWarp * W) {
    auto numbers = load_pack<W>(x_row + h);
    const auto factor = load_pack<W>(weight + h);
    for (int w = 0; w < W; ++w) numbers[w] *= r * factor[w];
    store_pack(y_row + h, numbers);
  }
}

/// Reads dy, x and, if there is one, dresidual, writes dx: 4 (or 3) sizeof(T) bytes an element. dx
/// may be dy or dresidual: whoever writes an element is the last to read it.
/// Differentiates forward_kernel's `numbers[w] *= r * factor[w]` by x, on which r depends too.
template <class T, int W>
__global__ void backward_input_kernel(T* dx, const T* dy, const T* x, const T* weight,
                                      const accumulate_t<T>* rstd, const T* dresidual, int64_t rows,
                                      int64_t H) {
  using A = accumulate_t<T>;
  const int64_t row = warp_of_grid();
  if (row >= rows) return;
  const T *dy_row = dy + row * H, *x_row = x + row * H;
  A product = 0;
  for (int64_t h = lane() * W; h < H; h += kWarp * W) {
    const auto d = load_pack<W>(dy_row + h), g = load_pack<W>(weight + h);
    const auto numbers = load_pack<W>(x_row + h);
    for (int w = 0; w < W; ++w) product += d[w] * g[w] * numbers[w];
  }
  const A r = rstd[row];
  // dy * weight along x: the part of the gradient that only changes x's length
  const A along = warp_sum(product) * r * r * r / static_cast<A>(H);
  for (int64_t h = lane() * W; h < H; h += kWarp * W) {
    auto d = load_pack<W>(dy_row + h);
    const auto g = load_pack<W>(weight + h), numbers = load_pack<W>(x_row + h);
    for (int w = 0; w < W; ++w) d[w] = d[w] * g[w] * r - numbers[w] * along;
    if (dresidual != nullptr) {
      const auto bypass = load_pack<W>(dresidual + row * H + h);
      for (int w = 0; w < W; ++w) d[w] += bypass[w];
    }
    store_pack(dx + row * H + h, d);
  }
}

/// Adds up blocks of kRowsPerSum rows. A thread has a column, so that a warp reads 32 neighbors of
/// each row: 2 sizeof(T) bytes an element, and a 64th of sizeof(A) written in sums, which are read
/// once more. Blocks of the grid are numbered by columns first.
/// Differentiates forward_kernel's `numbers[w] *= r * factor[w]` by weight.
template <class T>
__global__ void partial_weight_kernel(accumulate_t<T>* partial, const T* dy, const T* x,
                                      const accumulate_t<T>* rstd, int64_t rows, int64_t H,
                                      int64_t blocks_per_row) {
  const int64_t h = blockIdx.x % blocks_per_row * blockDim.x + threadIdx.x;
  if (h >= H) return;
  const int64_t block = blockIdx.x / blocks_per_row, begin = block * kRowsPerSum;
  const int64_t end = begin + kRowsPerSum < rows ? begin + kRowsPerSum : rows;
  accumulate_t<T> sum = 0;
  for (int64_t row = begin; row < end; ++row) {
    sum += load(dy[row * H + h]) * load(x[row * H + h]) * rstd[row];
  }
  partial[block * H + h] = sum;
}

/// Adds up the partial sums of a column, a thread each, in the order of the rows: reads them, and
/// dweight where it accumulates, and writes dweight.
template <class G, class A>
__global__ void add_partial_kernel(G* dweight, const A* partial, int64_t blocks, int64_t H,
                                   bool accumulate) {
  const int64_t h = thread_of_grid();
  if (h >= H) return;
  A sum = accumulate ? load(dweight[h]) : A{0};
  for (int64_t block = 0; block < blocks; ++block) sum += partial[block * H + h];
  store(dweight[h], sum);
}

}  // namespace

template <class T>
void RmsNorm<T>::forward(cudaStream_t stream, T* y, A* rstd, const T* x, const T* weight,
                         int64_t rows, int64_t H, double eps) {
  with_width<T>(H, {y, x, weight}, [&](auto width) {
    launch(forward_kernel<T, width>, ceil_div(rows, kRowsPerBlock), kThreads, 0, stream, y, rstd, x,
           weight, rows, H, A(eps));
  });
}

template <class T>
void RmsNorm<T>::backward_input(cudaStream_t stream, T* dx, const T* dy, const T* x,
                                const T* weight, const A* rstd, const T* dresidual, int64_t rows,
                                int64_t H) {
  with_width<T>(H, {dx, dy, x, weight, dresidual}, [&](auto width) {
    launch(backward_input_kernel<T, width>, ceil_div(rows, kRowsPerBlock), kThreads, 0, stream, dx,
           dy, x, weight, rstd, dresidual, rows, H);
  });
}

int64_t rmsnorm_partial_sums(int64_t rows) { return ceil_div(rows, kRowsPerSum); }

template <class T, class G>
void RmsNormWeight<T, G>::backward(cudaStream_t stream, G* dweight, A* partial, const T* dy,
                                   const T* x, const A* rstd, int64_t rows, int64_t H,
                                   bool accumulate) {
  const int64_t blocks = rmsnorm_partial_sums(rows), blocks_per_row = ceil_div(H, kThreads);
  launch(partial_weight_kernel<T>, blocks * blocks_per_row, kThreads, 0, stream, partial, dy, x,
         rstd, rows, H, blocks_per_row);
  launch(add_partial_kernel<G, A>, blocks_per_row, kThreads, 0, stream, dweight, partial, blocks, H,
         accumulate);
}

template struct RmsNorm<float>;
template struct RmsNorm<double>;
template struct RmsNorm<bf16>;
template struct RmsNormWeight<float, float>;
template struct RmsNormWeight<double, double>;
template struct RmsNormWeight<bf16, float>;
template struct RmsNormWeight<bf16, bf16>;

}  // namespace usp::cuda
