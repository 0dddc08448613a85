#include "swizzled.h"

/// Tensor cores: a warp multiplies 16 x 8 x 16 at once, from registers that ldmatrix fills; pieces
/// of 16 bytes change places, so that it meets no bank conflict. Three stages need one barrier a
/// step.
namespace usp::ladder {

namespace {

using namespace cuda;

constexpr int kTile = 128, kStages = 3, kBlock = 256, kRows = 64, kColumns = 32;  // of a warp
constexpr int kOperand = kTile * kRowBytes, kStage = 2 * kOperand;

__global__ void __launch_bounds__(kBlock) kernel(Product<bf16> p) {
  char* const shared = swizzled_shared();
  const int top = static_cast<int>(blockIdx.y) * kTile, side = static_cast<int>(blockIdx.x) * kTile;
  const int row = warp() / 4 * kRows, column = warp() % 4 * kColumns, lane = cuda::lane();
  const auto bring_step = [&](int step) {
    if (step * kDepth < p.k) {
      char* const stage = shared + step % kStages * kStage;
      bring_rows<kTile, kBlock>(stage, p.a, p.a_pitch, top, p.m, step * kDepth, p.k);
      bring_rows<kTile, kBlock>(stage + kOperand, p.b, p.b_pitch, side, p.n, step * kDepth, p.k);
    }
    cp_async_commit();
  };
  float d[4][4][4] = {};
  bring_step(0);
  bring_step(1);
  for (int step = 0; step * kDepth < p.k; ++step) {
    cp_async_wait<1>();
    __syncthreads();
    bring_step(step + 2);
    const char* const stage = shared + step % kStages * kStage;
    USP_UNROLL
    for (int l = 0; l < kDepth / 8; l += 2) {
      // [tensor_cores]
      uint32_t a[4][4], b[2][4];
      USP_UNROLL
      for (int i = 0; i < 4; ++i) {
        ldmatrix_x4(a[i], stage + place(row + i * 16 + lane % 16, l + lane / 16));
      }
      USP_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int at = place(column + j * 16 + lane / 16 * 8 + lane % 8, l + lane / 8 % 2);
        ldmatrix_x4(b[j], stage + kOperand + at);
      }
      USP_UNROLL
      for (int i = 0; i < 16; ++i) {
        mma_m16n8k16(d[i / 4][i % 4], a[i / 4],
                     {b[i % 4 / 2][i % 2 * 2], b[i % 4 / 2][i % 2 * 2 + 1]});
      }
      // [tensor_cores]
    }
  }
  USP_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int y = top + row + i / 8 * 16 + lane / 4 + i % 2 * 8;
    const float* const of = d[i / 8][i / 2 % 4] + i % 2 * 2;
    store_two(p, y, side + column + i / 2 % 4 * 8 + lane % 4 * 2, of[0], of[1]);
  }
}

/// Cost of a tile where a warp writes 16 bytes of c in a row, half of each sector.
Cost cost(int64_t k) { return cost_of_tile(kTile, kTile, full_depth(k), sizeof(bf16), 2); }

void run(const Queue& queue, const Product<bf16>& p) {
  launch(kernel, {grid_of(p, kTile), kBlock, kStages * kStage}, queue, p);
}

}  // namespace

const Rung<bf16> kMma{"mma", "tensor cores, swizzled tiles", 80, kTile, kTile, 8, cost, run};

}  // namespace usp::ladder
