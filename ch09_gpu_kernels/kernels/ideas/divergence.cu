#include "kernels.h"

/// Even elements take one way through a branch, odd ones the other. A warp takes both, one after
/// the other, if its lanes part.
namespace usp::ideas {

namespace {

__device__ float of_even(float x, float z) { return expf(x) + z; }
__device__ float of_odd(float x, float z) { return x * z; }

// [by_lane]
__global__ void by_lane(int64_t n, const float* x, const float* z, float* y) {
  const int64_t i = cuda::thread_of_grid();
  if (i >= n) return;
  if (i % 2 == 0) {
    y[i] = of_even(x[i], z[i]);
  } else {
    y[i] = of_odd(x[i], z[i]);
  }
}
// [by_lane]

// [by_warp]
/// A warp takes the even elements of 64, the next one the odd ones.
__global__ void by_warp(int64_t n, const float* x, const float* z, float* y) {
  const int64_t warp = cuda::warp_of_grid();
  const int64_t i = warp / 2 * 2 * kWarp + 2 * cuda::lane() + warp % 2;
  if (i >= n) return;
  if (warp % 2 == 0) {
    y[i] = of_even(x[i], z[i]);
  } else {
    y[i] = of_odd(x[i], z[i]);
  }
}
// [by_warp]

// [no_branch]
/// Both are computed, and one is weighed with zero.
__global__ void no_branch(int64_t n, const float* x, const float* z, float* y) {
  const int64_t i = cuda::thread_of_grid();
  if (i >= n) return;
  const float even = of_even(x[i], z[i]), odd = of_odd(x[i], z[i]);
  y[i] = even + static_cast<float>(i % 2) * (odd - even);
}
// [no_branch]

/// Counts of a rung. Kernels that read and write every other element touch each sector twice.
Counts predict(Shape s, int times, int64_t divergent_warps, int64_t flops) {
  return {
      .bytes = times * 3 * bytes_of(s.n()), .flops = flops, .divergent_branches = divergent_warps};
}

template <void (*kernel)(int64_t, const float*, const float*, float*)>
void run(const cuda::Queue& queue, const Data& d) {
  const int64_t n = d.shape.n();
  launch(kernel, ceil_div(n, 2 * kWarp) * 2 * kWarp / kWarp, kWarp, 0, queue, n, d.x, d.z, d.y);
}

const Rung kRungs[] = {
    {"by_lane", "lanes of a warp part", 75,
     [](Shape s) { return predict(s, 2, ceil_div(s.n(), kWarp), s.n() + s.n() / 2); },
     run<by_lane>},
    {"by_warp", "a warp goes one way", 75,
     [](Shape s) { return predict(s, 2, 0, s.n() + s.n() / 2); }, run<by_warp>},
    {"no_branch", "both ways, and one counts", 75,
     [](Shape s) { return predict(s, 1, 0, 5 * s.n()); }, run<no_branch>},
};

}  // namespace

const Ideas kDivergence{"divergence", kRungs};

}  // namespace usp::ideas
