#include "rung.h"

/// A thread computes 8 x 8 elements: for 16 numbers that it reads it multiplies 64 times. They lie
/// 16 rows and columns apart, so that neighboring lanes have neighboring columns.
namespace usp::ladder {

namespace {

constexpr int kTile = 128, kDepth = 8, kAcross = 16, kEach = kTile / kAcross;
constexpr int kThreads = kAcross * kAcross;

__global__ void __launch_bounds__(kThreads) kernel(Product<float> p) {
  __shared__ float left[kTile][kDepth], right[kDepth][kTile];
  const int thread = static_cast<int>(threadIdx.x), x = thread % kAcross, y = thread / kAcross;
  const int top = static_cast<int>(blockIdx.y) * kTile, side = static_cast<int>(blockIdx.x) * kTile;
  float sums[kEach][kEach] = {};
  for (int first = 0; first < p.k; first += kDepth) {
    for (int at = thread; at < kTile * kDepth; at += kThreads) {
      const int i = at / kDepth, l = at % kDepth, row = at / kTile, j = at % kTile;
      const bool in_a = top + i < p.m && first + l < p.k;
      const bool in_b = first + row < p.k && side + j < p.n;
      left[i][l] = in_a ? p.a[int64_t{top + i} * p.a_pitch + first + l] : 0;
      right[row][j] = in_b ? p.b[int64_t{first + row} * p.b_pitch + side + j] : 0;
    }
    __syncthreads();
    // [products]
    USP_UNROLL
    for (int l = 0; l < kDepth; ++l) {
      float of_a[kEach], of_b[kEach];
      USP_UNROLL
      for (int i = 0; i < kEach; ++i) {
        of_a[i] = left[y + i * kAcross][l];
        of_b[i] = right[l][x + i * kAcross];
      }
      USP_UNROLL
      for (int i = 0; i < kEach * kEach; ++i) {
        sums[i / kEach][i % kEach] += of_a[i / kEach] * of_b[i % kEach];
      }
    }
    // [products]
    __syncthreads();
  }
  USP_UNROLL
  for (int i = 0; i < kEach * kEach; ++i) {
    const int row = top + y + i / kEach * kAcross, column = side + x + i % kEach * kAcross;
    if (row < p.m && column < p.n) {
      p.c[int64_t{row} * p.c_pitch + column] = sums[i / kEach][i % kEach];
    }
  }
}

/// Each tile once, and c.
Cost cost(int64_t k) { return cost_of_tile(kTile, kTile, k, sizeof(float)); }

void run(const cuda::Queue& queue, const Product<float>& p) {
  launch(kernel, {grid_of(p, kTile), kThreads}, queue, p);
}

}  // namespace

const Rung<float> kCoarsened2d{
    "coarsened_2d", "a thread 8 x 8 elements", 75, kTile, kTile, 1, cost, run};

}  // namespace usp::ladder
