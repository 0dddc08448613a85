#pragma once

#include "kernels.h"

/// A sum in passes: each block leaves the sum of its part, of which the next pass makes parts.
namespace usp::ideas {

inline constexpr int64_t kEach = 4, kPart = kEach * kThreads;  ///< numbers of a thread, of a block

/// A thread's numbers of its block's part.
__device__ inline float own_sum(int64_t n, const float* x) {
  float sum = 0;
  for (int64_t i = 0; i < kEach; ++i) {
    const int64_t at = blockIdx.x * kPart + i * kThreads + threadIdx.x;
    if (at < n) sum += x[at];
  }
  return sum;
}

/// use(numbers, blocks) for every pass, the last of which has one block.
template <class F>
void each_pass(int64_t n, F use) {
  for (int64_t blocks = 0; blocks != 1; n = blocks) use(n, blocks = ceil_div(n, kPart));
}

/// Queues a kernel that adds up parts of numbers, pass after pass, until one sum is left.
template <void (*kernel)(int64_t, const float*, float*)>
void run_passes(const cuda::Queue& queue, const Data& d) {
  const float* from = d.x;
  float* to = d.scratch;
  each_pass(d.shape.n(), [&](int64_t n, int64_t blocks) {
    float* const sums = blocks == 1 ? d.y : to;
    launch(kernel, blocks, kThreads, 0, queue, n, from, sums);
    from = sums;
    to += ceil_div(blocks, 8) * 8;
  });
}

/// Turns beyond the first of a block: the lanes of a gap lie in 16 / gap banks, at least one, and
/// each step reads twice and writes once.
constexpr int64_t interleaved_conflicts() {
  int64_t turns = 0;
  for (int64_t gap = 1, threads = kThreads / 2; threads > 0; gap *= 2, threads /= 2) {
    const int64_t lanes = min(threads, int64_t{kWarp}), banks = max(kWarp / 2 / gap, int64_t{1});
    turns += 3 * ceil_div(threads, kWarp) * (ceil_div(lanes, banks) - 1);
  }
  return turns;
}

inline Counts predict_passes(Shape s, int64_t barriers, int64_t conflicts) {
  Counts all{.flops = s.n(), .launches = 0};
  each_pass(s.n(), [&](int64_t n, int64_t blocks) {
    all.bytes += bytes_of(n) + blocks * kSector;
    all.barriers += blocks * barriers;
    all.bank_conflicts += blocks * conflicts;
    ++all.launches;
  });
  return all;
}

}  // namespace usp::ideas
