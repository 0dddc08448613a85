#include "four.h"

/// 16 bytes in one access: a quarter of the requests for the same bytes. The tile of a is written
/// to shared memory the other way round, so that a thread's rows lie beside each other there, too;
/// four numbers more in a line keep those writes in banks of their own.
namespace usp::ladder {

namespace {

constexpr int kTile = 128, kDepth = 8, kAcross = 16, kThreads = kAcross * kAcross;
constexpr int kLine = kTile + 4;

__global__ void __launch_bounds__(kThreads) kernel(Product<float> p) {
  alignas(16) __shared__ float left[kDepth][kLine], right[kDepth][kTile];
  const int thread = static_cast<int>(threadIdx.x), x = thread % kAcross * 4;
  const int y = thread / kAcross * 4, half = kTile / 2;
  const int top = static_cast<int>(blockIdx.y) * kTile, side = static_cast<int>(blockIdx.x) * kTile;
  const int a_row = thread / 2, a_column = thread % 2 * 4;
  const int b_row = thread / 32, b_column = thread % 32 * 4;
  float sums[8][2][4] = {};
  for (int first = 0; first < p.k; first += kDepth) {
    float4 of_a = make_float4(0, 0, 0, 0), of_b = of_a;
    if (top + a_row < p.m) {
      of_a = load_four(p.a + int64_t{top + a_row} * p.a_pitch, first + a_column, p.k);
    }
    if (first + b_row < p.k) {
      of_b = load_four(p.b + int64_t{first + b_row} * p.b_pitch, side + b_column, p.n);
    }
    left[a_column][a_row] = of_a.x;
    left[a_column + 1][a_row] = of_a.y;
    left[a_column + 2][a_row] = of_a.z;
    left[a_column + 3][a_row] = of_a.w;
    *reinterpret_cast<float4*>(&right[b_row][b_column]) = of_b;
    __syncthreads();
    USP_UNROLL
    for (int l = 0; l < kDepth; ++l) {
      USP_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float4 rows = *reinterpret_cast<const float4*>(&left[l][y + i * half]);
        USP_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float4 columns = *reinterpret_cast<const float4*>(&right[l][x + j * half]);
          add_scaled(sums[4 * i][j], rows.x, columns);
          add_scaled(sums[4 * i + 1][j], rows.y, columns);
          add_scaled(sums[4 * i + 2][j], rows.z, columns);
          add_scaled(sums[4 * i + 3][j], rows.w, columns);
        }
      }
    }
    __syncthreads();
  }
  USP_UNROLL
  for (int i = 0; i < 16; ++i) {
    store_four(p, top + y + i / 2 % 4 + i / 8 * half, side + x + i % 2 * half, sums[i / 2][i % 2]);
  }
}

/// The same bytes.
Cost cost(int64_t k) { return cost_of_tile(kTile, kTile, k, sizeof(float)); }

void run(const cuda::Queue& queue, const Product<float>& p) {
  launch(kernel, {grid_of(p, kTile), kThreads}, queue, p);
}

}  // namespace

const Rung<float> kVectorised{"vectorised", "16 bytes in one access", 75, kTile, kTile, 4, cost,
                              run};

}  // namespace usp::ladder
