#pragma once

#include <cmath>

#include "cuda/launch.h"
#include "cuda/numbers.h"

/// Sums and maxima over the threads of a warp or a block. Their order is fixed by the threads'
/// numbers, so that two runs give the same bits; nothing here uses atomics.
namespace usp::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFF;

/// Combines x of all lanes in five steps; every lane gets the result. In step k a lane meets the
/// one whose number differs in one bit, so that both combine the same two values.
template <class A, class Combine>
__device__ A warp_reduce(A x, const Combine& combine) {
  for (int bit = kWarp / 2; bit > 0; bit /= 2) {
    x = combine(x, __shfl_xor_sync(kAllLanes, x, bit));
  }
  return x;
}

/// a + b, for warp_reduce().
template <class A>
struct Add {
  __device__ A operator()(A a, A b) const { return a + b; }
};
/// The larger of a and b, for warp_reduce().
template <class A>
struct Larger {
  __device__ A operator()(A a, A b) const { return b > a ? b : a; }
};

template <class A>
__device__ A warp_sum(A x) {
  return warp_reduce(x, Add<A>());
}
template <class A>
__device__ A warp_max(A x) {
  return warp_reduce(x, Larger<A>());
}

/// The sum of x over the block, for every thread. `of_warps` is shared memory for a number per
/// warp, which nothing else may use in the same kernel: so one barrier is enough.
template <class A>
__device__ A block_sum(A x, A* of_warps) {
  x = warp_sum(x);
  if (lane() == 0) of_warps[warp()] = x;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  return warp_sum(lane() < warps ? of_warps[lane()] : A{0});
}

/// The largest x added so far and the sum of exp(x - max): what softmax needs of a row, read once.
/// Milakov and Gimelshein (2018), https://arxiv.org/abs/1805.02867. NaN reaches the sum. Of none,
/// or of -inf alone, the sum is 0.
template <class A>
struct SoftmaxSum {
  A max = -kInfinity<A>;
  A sum = 0;

  /// What to subtract from a score: -inf - -inf would be NaN.
  __device__ static A shift(A max) { return max == -kInfinity<A> ? 0 : max; }

  /// Adds a number of the row.
  __device__ void add(A x) {
    if (x > max) {
      sum *= std::exp(max - x);
      max = x;
    }
    sum += std::exp(x - shift(max));
  }
  /// Adds what another thread has seen.
  __device__ void add(A other_max, A other_sum) {
    const A larger = other_max > max ? other_max : max;
    sum = sum * std::exp(max - shift(larger)) + other_sum * std::exp(other_max - shift(larger));
    max = larger;
  }
};

/// Softmax sum of the whole warp, for every lane. Lanes that meet add in order of their numbers.
template <class A>
__device__ SoftmaxSum<A> warp_softmax_sum(SoftmaxSum<A> x) {
  for (int bit = kWarp / 2; bit > 0; bit /= 2) {
    const A max = __shfl_xor_sync(kAllLanes, x.max, bit);
    const A sum = __shfl_xor_sync(kAllLanes, x.sum, bit);
    x.add(max, sum);
  }
  return x;
}

}  // namespace usp::cuda
