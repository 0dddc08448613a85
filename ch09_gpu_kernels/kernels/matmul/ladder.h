#pragma once

#include <span>

#include "cuda/tensor_maps.h"

namespace usp::cuda {
struct Queue;
}

/// A product of matrices, from the plainest kernel to one that uses all that a Hopper card has:
/// each rung is a file with one idea more.
namespace usp::ladder {

using bf16 = __nv_bfloat16;  ///< CUDA's type

/// c = a b. Rows begin `pitch` elements after each other.
template <class T>
struct Product {
  int m, n, k;
  const T* a;  ///< m x k
  int a_pitch;
  const T* b;  ///< f32: k x n; bf16: n x k, as the weight of a linear layer lies
  int b_pitch;
  T* c;  ///< m x n
  int c_pitch;
  cuda::TensorMaps* maps = nullptr;  ///< for the rungs that copy boxes
  int blocks = 0;                    ///< of a persistent kernel; 0: one a multiprocessor
};

/// What a tile of c costs: bytes that its block asks of global memory, in sectors of 32 that a warp
/// touches and in whole boxes; operations, of depths that are filled up with zeros.
struct Cost {
  int64_t bytes, flops;
};

/// A kernel and what it is there for. run() queues it.
template <class T>
struct Rung {
  const char* name;  ///< of its file, too
  const char* idea;
  int capability;     ///< from which on it runs: 75, 80; 90 alone for those that copy boxes
  int rows, columns;  ///< of a tile
  int unit;           ///< addresses and pitches are multiples of this many elements
  Cost (*cost)(int64_t k);
  void (*run)(const cuda::Queue& queue, const Product<T>& product);
};

extern const Rung<float> kNaive, kCoalesced, kTiled, kCoarsened1d, kCoarsened2d, kVectorised,
    kCpAsync;
extern const Rung<bf16> kMma, kTmaWgmma, kRing, kPersistent;

/// Rungs in f32, the lowest first.
std::span<const Rung<float>* const> f32_rungs();
/// Rungs in bf16, which go on from there.
std::span<const Rung<bf16>* const> bf16_rungs();

/// Throws UsageError where the rung takes no such pitch or address.
template <class T>
void check(const Rung<T>& rung, const Product<T>& product);

}  // namespace usp::ladder
