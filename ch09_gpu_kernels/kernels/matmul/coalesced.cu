#include "rung.h"

/// Lanes of a warp have a column each, of one row: they read 128 bytes of b that lie together, and
/// the same number of a. Nothing else changes.
namespace usp::ladder {

namespace {

constexpr int kTile = 32, kSector = 32;

__global__ void kernel(Product<float> p) {
  // [element]
  const int row = static_cast<int>(blockIdx.y * kTile + threadIdx.x / kTile);
  const int column = static_cast<int>(blockIdx.x * kTile + threadIdx.x % kTile);
  // [element]
  if (row >= p.m || column >= p.n) return;
  const float* const a = p.a + int64_t{row} * p.a_pitch;
  const float* const b = p.b + column;
  float sum = 0;
  for (int l = 0; l < p.k; ++l) sum += a[l] * b[int64_t{l} * p.b_pitch];
  p.c[int64_t{row} * p.c_pitch + column] = sum;
}

/// A warp's step: one sector of a, four of b. At the end four of c.
Cost cost(int64_t k) { return {kTile * (k * (1 + 4) + 4) * kSector, 2 * kTile * kTile * k}; }

void run(const cuda::Queue& queue, const Product<float>& p) {
  launch(kernel, {grid_of(p, kTile), kTile * kTile}, queue, p);
}

}  // namespace

const Rung<float> kCoalesced{
    "coalesced", "lanes read what lies together", 75, kTile, kTile, 1, cost, run};

}  // namespace usp::ladder
