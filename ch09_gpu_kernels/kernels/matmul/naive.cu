#include "rung.h"

/// A thread computes an element of c. Lanes of a warp have a row each: what they read of a in one
/// step lies in 32 places, and of every 32 bytes that come they use 4.
namespace usp::ladder {

namespace {

constexpr int kTile = 32, kSector = 32;

__global__ void kernel(Product<float> p) {
  // [element]
  const int row = static_cast<int>(blockIdx.y * kTile + threadIdx.x % kTile);
  const int column = static_cast<int>(blockIdx.x * kTile + threadIdx.x / kTile);
  // [element]
  if (row >= p.m || column >= p.n) return;
  const float* const a = p.a + int64_t{row} * p.a_pitch;
  const float* const b = p.b + column;
  float sum = 0;
  for (int l = 0; l < p.k; ++l) sum += a[l] * b[int64_t{l} * p.b_pitch];
  p.c[int64_t{row} * p.c_pitch + column] = sum;
}

/// A warp's step: 32 sectors of a, one of b. At the end 32 of c.
Cost cost(int64_t k) {
  return {kTile * (k * (kTile + 1) + kTile) * kSector, 2 * kTile * kTile * k};
}

void run(const cuda::Queue& queue, const Product<float>& p) {
  launch(kernel, {grid_of(p, kTile), kTile * kTile}, queue, p);
}

}  // namespace

const Rung<float> kNaive{"naive", "a thread an element", 75, kTile, kTile, 1, cost, run};

}  // namespace usp::ladder
