#include "cuda/kernels.h"
#include "cuda/launch.h"

/// Products of matrices that the library has no kernel for: of any size and any strides, none of
/// them large.
namespace usp::cuda {

namespace {

constexpr int kTile = 16;  ///< rows and columns of a block's part of c

/// A block has a tile of c, a thread an element of it. Tiles of a and b come to shared memory,
/// where each number is read kTile times. An element of shared memory beside each row keeps the
/// columns of b's tile in banks of their own.
template <class T, class G>
__global__ void kernel(Strided<G> c, Strided<T> a, Strided<T> b, int64_t m, int64_t n, int64_t k,
                       bool accumulate, int64_t tiles_m, int64_t tiles_n) {
  using A = accumulate_t<T>;
  __shared__ A left[kTile][kTile + 1], right[kTile][kTile + 1];
  const int x = static_cast<int>(threadIdx.x) % kTile, y = static_cast<int>(threadIdx.x) / kTile;
  const int64_t batch = blockIdx.x / (tiles_m * tiles_n);
  const int64_t i = blockIdx.x / tiles_n % tiles_m * kTile + y;
  const int64_t j = blockIdx.x % tiles_n * kTile + x;
  A sum = 0;
  for (int64_t first = 0; first < k; first += kTile) {
    left[y][x] = i < m && first + x < k ? load(*a.at(batch, i, first + x)) : A{0};
    right[y][x] = first + y < k && j < n ? load(*b.at(batch, first + y, j)) : A{0};
    __syncthreads();
    for (int l = 0; l < kTile; ++l) sum += left[y][l] * right[l][x];
    __syncthreads();
  }
  if (i >= m || j >= n) return;
  G* to = c.at(batch, i, j);
  store(*to, accumulate ? load(*to) + sum : sum);
}

}  // namespace

template <class T, class G>
void Matmul<T, G>::run(cudaStream_t stream, const Strided<G>& c, const Strided<T>& a,
                       const Strided<T>& b, int64_t count, int64_t m, int64_t n, int64_t k,
                       bool accumulate) {
  const int64_t tiles_m = ceil_div(m, kTile), tiles_n = ceil_div(n, kTile);
  launch(kernel<T, G>, count * tiles_m * tiles_n, kTile * kTile, 0, stream, c, a, b, m, n, k,
         accumulate, tiles_m, tiles_n);
}

template struct Matmul<float, float>;
template struct Matmul<double, double>;
template struct Matmul<bf16, bf16>;
template struct Matmul<bf16, float>;

}  // namespace usp::cuda
