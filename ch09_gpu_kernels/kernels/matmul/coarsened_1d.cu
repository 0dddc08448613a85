#include "rung.h"

/// A thread computes eight elements of a column: it reads a number of b once for all of them, so
/// shared memory is asked for 9 numbers where it was for 16.
namespace usp::ladder {

namespace {

constexpr int kTile = 64, kDepth = 8, kEach = 8, kThreads = kTile * kTile / kEach;

__global__ void kernel(Product<float> p) {
  __shared__ float left[kTile][kDepth], right[kDepth][kTile];
  const int thread = static_cast<int>(threadIdx.x), x = thread % kTile, y = thread / kTile * kEach;
  const int top = static_cast<int>(blockIdx.y) * kTile;
  const int column = static_cast<int>(blockIdx.x) * kTile + x;
  const int a_row = thread / kDepth, a_column = thread % kDepth, b_row = thread / kTile;
  float sums[kEach] = {};
  for (int first = 0; first < p.k; first += kDepth) {
    const bool in_a = top + a_row < p.m && first + a_column < p.k;
    const bool in_b = first + b_row < p.k && column < p.n;
    left[a_row][a_column] = in_a ? p.a[int64_t{top + a_row} * p.a_pitch + first + a_column] : 0;
    right[b_row][x] = in_b ? p.b[int64_t{first + b_row} * p.b_pitch + column] : 0;
    __syncthreads();
    USP_UNROLL
    for (int l = 0; l < kDepth; ++l) {
      const float of_b = right[l][x];
      USP_UNROLL
      for (int i = 0; i < kEach; ++i) sums[i] += left[y + i][l] * of_b;
    }
    __syncthreads();
  }
  USP_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int row = top + y + i;
    if (row < p.m && column < p.n) p.c[int64_t{row} * p.c_pitch + column] = sums[i];
  }
}

/// Each tile once, and c: with tiles twice as wide, half as much for an element.
Cost cost(int64_t k) { return cost_of_tile(kTile, kTile, k, sizeof(float)); }

void run(const cuda::Queue& queue, const Product<float>& p) {
  launch(kernel, {grid_of(p, kTile), kThreads}, queue, p);
}

}  // namespace

const Rung<float> kCoarsened1d{
    "coarsened_1d", "a thread eight of a column", 75, kTile, kTile, 1, cost, run};

}  // namespace usp::ladder
