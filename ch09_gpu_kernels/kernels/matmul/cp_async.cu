#include "four.h"

/// Two buffers: while a block multiplies tiles, the next ones are on their way, past the registers.
/// What cp.async brings lies as it did, so that a thread reads four steps of a row of a at once.
namespace usp::ladder {

namespace {

using namespace cuda;

constexpr int kTile = 128, kDepth = 16, kAcross = 16, kEach = kTile / kAcross;
constexpr int kBlock = kAcross * kAcross, kStage = 2 * kTile * kDepth;

/// Tiles of a step, a thread's pieces: zeros beyond the matrices.
__device__ void bring(float* to, const Product<float>& p, int top, int side, int first) {
  for (int at = static_cast<int>(threadIdx.x) * 4; at < kTile * kDepth; at += kBlock * 4) {
    const int row = top + at / kDepth, l = first + at % kDepth;
    const int a_bytes = row < p.m ? max(0, min(4, p.k - l)) * 4 : 0;
    cp_async_16(to + at, a_bytes > 0 ? p.a + int64_t{row} * p.a_pitch + l : p.a, a_bytes);
    const int b_row = first + at / kTile, column = side + at % kTile;
    const int b_bytes = b_row < p.k ? max(0, min(4, p.n - column)) * 4 : 0;
    cp_async_16(to + kTile * kDepth + at,
                b_bytes > 0 ? p.b + int64_t{b_row} * p.b_pitch + column : p.b, b_bytes);
  }
}

__global__ void __launch_bounds__(kBlock) kernel(Product<float> p) {
  auto* const shared = reinterpret_cast<float*>(swizzled_shared());
  const int x = static_cast<int>(threadIdx.x) % kAcross * 4,
            y = static_cast<int>(threadIdx.x) / kAcross;
  const int top = static_cast<int>(blockIdx.y) * kTile, side = static_cast<int>(blockIdx.x) * kTile;
  float sums[kEach][2][4] = {};
  bring(shared, p, top, side, 0);
  cp_async_commit();
  for (int first = 0, now = 0; first < p.k; first += kDepth, now ^= 1) {
    if (first + kDepth < p.k) bring(shared + (now ^ 1) * kStage, p, top, side, first + kDepth);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const float *const left = shared + now * kStage, *const right = left + kTile * kDepth;
    for (int l = 0; l < kDepth; l += 4) {
      float4 of_b[4][2];
      USP_UNROLL
      for (int i = 0; i < 8; ++i) {
        of_b[i / 2][i % 2] =
            *reinterpret_cast<const float4*>(right + (l + i / 2) * kTile + x + i % 2 * kTile / 2);
      }
      USP_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const float4 of_a = *reinterpret_cast<const float4*>(left + (y + i * kAcross) * kDepth + l);
        USP_UNROLL
        for (int j = 0; j < 2; ++j) {
          add_scaled(sums[i][j], of_a.x, of_b[0][j]);
          add_scaled(sums[i][j], of_a.y, of_b[1][j]);
          add_scaled(sums[i][j], of_a.z, of_b[2][j]);
          add_scaled(sums[i][j], of_a.w, of_b[3][j]);
        }
      }
    }
    __syncthreads();
  }
  USP_UNROLL
  for (int i = 0; i < 2 * kEach; ++i) {
    store_four(p, top + y + i / 2 * kAcross, side + x + i % 2 * kTile / 2, sums[i / 2][i % 2]);
  }
}

/// The same bytes.
Cost cost(int64_t k) { return cost_of_tile(kTile, kTile, k, sizeof(float)); }

void run(const Queue& queue, const Product<float>& p) {
  launch(kernel, {grid_of(p, kTile), kBlock, 2 * kStage * 4}, queue, p);
}

}  // namespace

const Rung<float> kCpAsync{"cp_async", "the next tiles come meanwhile", 80, kTile, kTile, 4, cost,
                           run};

}  // namespace usp::ladder
