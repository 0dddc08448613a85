#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace usp::cuda {

namespace {

/// A block a position of a sample; its threads take pairs (c, c + D/2) of all heads in turn. Reads
/// and writes every element once, 2 sizeof(T) bytes; the block's row of cos and sin is read once
/// and stays in the L1 cache for the other heads. Threads side by side have channels side by side.
/// A sign of -1 differentiates rope_kernel's `x0 * c - x1 * sine` and `x1 * c + x0 * sine`.
template <class T>
__global__ void rope_kernel(Heads<T> x, const accumulate_t<T>* cos, const accumulate_t<T>* sin,
                            Positions positions, accumulate_t<T> sign, int64_t S, int N,
                            int pairs) {
  using A = accumulate_t<T>;
  const int64_t b = blockIdx.x / S, s = blockIdx.x % S;
  const int64_t table_row = positions[s] * pairs;
  for (int i = static_cast<int>(threadIdx.x); i < N * pairs; i += static_cast<int>(blockDim.x)) {
    const int n = i / pairs, pair = i % pairs;
    T *low = x.at(b, s, n) + pair, *high = low + pairs;
    const A c = cos[table_row + pair], sine = sign * sin[table_row + pair];
    const A x0 = load(*low), x1 = load(*high);
    store(*low, x0 * c - x1 * sine);
    store(*high, x1 * c + x0 * sine);
  }
}

}  // namespace

template <class T>
void Rope<T>::run(cudaStream_t stream, const Heads<T>& x, const A* cos, const A* sin,
                  const Positions& positions, bool inverse, int64_t B, int64_t S, int64_t N,
                  int64_t D) {
  launch(rope_kernel<T>, N * D == 0 ? 0 : B * S, kThreads, 0, stream, x, cos, sin, positions,
         inverse ? A{-1} : A{1}, S, static_cast<int>(N), static_cast<int>(D / 2));
}

template struct Rope<float>;
template struct Rope<double>;
template struct Rope<bf16>;

}  // namespace usp::cuda
