#include "rung.h"

/// A block brings a tile of a and one of b to shared memory, where each number is read 32 times.
namespace usp::ladder {

namespace {

constexpr int kTile = 32;

__global__ void kernel(Product<float> p) {
  __shared__ float left[kTile][kTile], right[kTile][kTile];
  const int x = static_cast<int>(threadIdx.x) % kTile, y = static_cast<int>(threadIdx.x) / kTile;
  const int row = static_cast<int>(blockIdx.y) * kTile + y;
  const int column = static_cast<int>(blockIdx.x) * kTile + x;
  float sum = 0;
  // [tiles]
  for (int first = 0; first < p.k; first += kTile) {
    const bool in_a = row < p.m && first + x < p.k, in_b = first + y < p.k && column < p.n;
    left[y][x] = in_a ? p.a[int64_t{row} * p.a_pitch + first + x] : 0;
    right[y][x] = in_b ? p.b[int64_t{first + y} * p.b_pitch + column] : 0;
    __syncthreads();
    for (int l = 0; l < kTile; ++l) sum += left[y][l] * right[l][x];
    __syncthreads();
  }
  // [tiles]
  if (row < p.m && column < p.n) p.c[int64_t{row} * p.c_pitch + column] = sum;
}

/// Each tile once, and c.
Cost cost(int64_t k) { return cost_of_tile(kTile, kTile, k, sizeof(float)); }

void run(const cuda::Queue& queue, const Product<float>& p) {
  launch(kernel, {grid_of(p, kTile), kTile * kTile}, queue, p);
}

}  // namespace

const Rung<float> kTiled{"tiled", "tiles in shared memory", 75, kTile, kTile, 1, cost, run};

}  // namespace usp::ladder
