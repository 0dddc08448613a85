#include "passes.h"

/// The sum of n numbers. All but the first add in two passes, in an order that depends on nothing:
/// each block sums its part, then one block sums those.
namespace usp::ideas {

namespace {

// [atomics]
__global__ void zero(float* y) { *y = 0; }

__global__ void atomics(int64_t n, const float* x, float* y) {
  const int64_t i = cuda::thread_of_grid();
  if (i < n) atomicAdd(y, x[i]);
}
// [atomics]

// [interleaved]
/// Threads 0, 1, ... take every other gap.
struct Interleaved {
  __device__ static void sum(float* shared, int thread) {
    for (int gap = 1; gap < kThreads; gap *= 2) {
      const int at = 2 * gap * thread;
      if (at < kThreads) shared[at] += shared[at + gap];
      __syncthreads();
    }
  }
};
// [interleaved]
// [halves]
/// Threads 0, 1, ... take neighbors.
struct Halves {
  __device__ static void sum(float* shared, int thread) {
    for (int gap = kThreads / 2; gap > 0; gap /= 2) {
      if (thread < gap) shared[thread] += shared[thread + gap];
      __syncthreads();
    }
  }
};
// [halves]

// [tree]
template <class Tree>
__global__ void tree(int64_t n, const float* x, float* y) {
  __shared__ float shared[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = own_sum(n, x);
  __syncthreads();
  Tree::sum(shared, thread);
  if (thread == 0) y[blockIdx.x] = shared[0];
}
// [tree]

// [shuffles]
__global__ void shuffles(int64_t n, const float* x, float* y) {
  __shared__ float of_warps[kThreads / kWarp];
  float sum = own_sum(n, x);
  for (int gap = kWarp / 2; gap > 0; gap /= 2) sum += __shfl_down_sync(~0U, sum, gap);
  if (cuda::lane() == 0) of_warps[cuda::warp()] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kThreads / kWarp; ++i) sum += of_warps[i];
  y[blockIdx.x] = sum;
}
// [shuffles]

constexpr int kLevels = 8;  // of a tree of 256

const Rung kRungs[] = {
    {"atomics", "every thread adds to one number", 75,
     [](Shape s) -> Counts {
       return {.bytes = bytes_of(s.n()) + kSector, .flops = s.n(), .launches = 2};
     },
     [](const cuda::Queue& queue, const Data& d) {
       launch(zero, 1, 1, 0, queue, d.y);
       launch(atomics, blocks_for(d.shape.n()), kThreads, 0, queue, d.shape.n(), d.x, d.y);
     }},
    {"interleaved", "a tree, neighbors first", 75,
     [](Shape s) { return predict_passes(s, 1 + kLevels, interleaved_conflicts()); },
     run_passes<tree<Interleaved>>},
    {"halves", "a tree, halves first", 75,
     [](Shape s) { return predict_passes(s, 1 + kLevels, 0); }, run_passes<tree<Halves>>},
    {"shuffles", "warps add in registers", 75, [](Shape s) { return predict_passes(s, 1, 0); },
     run_passes<shuffles>},
};

}  // namespace

const Ideas kReduction{"reduction", kRungs};

}  // namespace usp::ideas
