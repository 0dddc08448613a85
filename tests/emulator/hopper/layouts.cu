#include "kernels.h"

/// Tiles as descriptors of wgmma speak of them: every swizzle, k or m and n contiguous. Matrices of
/// ldmatrix and stmatrix.
namespace usp::hopper {
namespace {

using namespace usp::cuda;

/// Where element (row of m or n, k) of a 64 x 64 tile is: the layouts that descriptors speak of.
__device__ int place(int row, int k, int swizzle, bool mn) {
  const int inner = mn ? row : k, outer = mn ? k : row;  // contiguous; from line to line
  if (swizzle == 0) return inner / 8 * 1024 + outer / 8 * 128 + outer % 8 * 16 + inner % 8 * 2;
  const int line = swizzle / 2;  // elements
  const int at = inner / line * (64 * swizzle) + outer * swizzle + inner % line * 2;
  const int chunk = swizzle / 16 - 1;
  return at ^ (at >> 7 & chunk) << 4;
}

template <int a_mn, int b_mn>
__global__ void layouts_kernel(int swizzle, const __nv_bfloat16* a, const __nv_bfloat16* b,
                               float* c) {
  char* const shared = swizzled_shared();
  for (int i = threadIdx.x; i < 64 * 64; i += 128) {
    *reinterpret_cast<__nv_bfloat16*>(shared + place(i / 64, i % 64, swizzle, a_mn)) = a[i];
    *reinterpret_cast<__nv_bfloat16*>(shared + 8192 + place(i / 64, i % 64, swizzle, b_mn)) = b[i];
  }
  fence_proxy_async();
  __syncthreads();
  float d[32];
  const auto tile = [&](int at, bool mn, int step) {
    const Swizzle how = swizzle == 128  ? Swizzle::bytes128
                        : swizzle == 64 ? Swizzle::bytes64
                        : swizzle == 32 ? Swizzle::bytes32
                                        : Swizzle::none;
    if (swizzle == 0) {
      // K-major: 8 k are 1024 bytes from the next, 8 rows 128. MN-major: 8 k 128, 8 rows 1024.
      return mn ? descriptor(shared + at + step * 256, how, 128, 1024)
                : descriptor(shared + at + step * 2048, how, 1024, 128);
    }
    const int k = step * 16;
    return mn ? descriptor(shared + at + k * swizzle, how, 64 * swizzle, 8 * swizzle)
              : descriptor(shared + at + k * 2 / swizzle * (64 * swizzle) + k * 2 % swizzle, how, 0,
                           8 * swizzle);
  };
  uint64_t left[4], right[4];  // before the products, since they branch
  USP_UNROLL
  for (int step = 0; step < 4; ++step) {
    left[step] = tile(0, a_mn, step);
    right[step] = tile(8192, b_mn, step);
  }
  wgmma_fence(d);
  USP_UNROLL
  for (int step = 0; step < 4; ++step) wgmma<a_mn, b_mn>(d, left[step], right[step], step > 0);
  wgmma_commit();
  wgmma_wait<0>(d);
  for (int i = 0; i < 32; ++i) {
    c[(wgmma_row(threadIdx.x) + i / 2 % 2 * 8) * 64 + wgmma_column(threadIdx.x) + i / 4 * 8 +
      i % 2] = d[i];
  }
}

template <int registers>
__global__ void __launch_bounds__(128)
    registers_kernel(const __nv_bfloat16* a, const __grid_constant__ CUtensorMap b, int plane,
                     float* c) {
  constexpr int n = 2 * registers, bytes = n * 128;
  char* const shared = swizzled_shared();
  Barrier* const full = reinterpret_cast<Barrier*>(shared + bytes);
  if (threadIdx.x == 0) {
    full->init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    full->arrive_expect(bytes);
    tma_load_3d(shared, &b, full, 0, 0, plane);
  }
  const int row = wgmma_row(threadIdx.x), column = wgmma_column(threadIdx.x);
  uint32_t left[4][4];
  USP_UNROLL
  for (int i = 0; i < 16; ++i) {
    const int k = i / 4 * 16 + column + i % 4 / 2 * 8;
    left[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(a + (row + i % 2 * 8) * 64 + k);
  }
  full->wait(0);
  float d[registers];
  wgmma_fence(d, left[0], left[1], left[2], left[3]);
  USP_UNROLL
  for (int i = 0; i < 4; ++i) {
    wgmma(d, left[i], descriptor(shared + i * 32, Swizzle::bytes128, 0, 1024), i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>(d);
  USP_UNROLL
  for (int i = 0; i < registers; ++i) {
    c[(row + i / 2 % 2 * 8) * n + column + i / 4 * 8 + i % 2] = d[i];
  }
}

/// One warp turns a matrix of 16 x 16 around, in shared memory.
__global__ void turn_kernel(const __nv_bfloat16* x, __nv_bfloat16* y) {
  auto* const tile = reinterpret_cast<__nv_bfloat16*>(swizzled_shared());
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) tile[i] = x[i];
  __syncwarp();
  uint32_t d[4];
  ldmatrix_x4_trans(d, tile + lane % 16 * 16 + lane / 16 * 8);
  __syncwarp();
  stmatrix_x4(tile + lane / 16 * 128 + lane % 8 * 16 + lane / 8 % 2 * 8, d);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) y[i] = tile[i];
}

}  // namespace

void layout_product(int swizzle, bool a_mn, bool b_mn, const __nv_bfloat16* a,
                    const __nv_bfloat16* b, float* c) {
  const auto kernel = a_mn ? (b_mn ? layouts_kernel<1, 1> : layouts_kernel<1, 0>)
                           : (b_mn ? layouts_kernel<0, 1> : layouts_kernel<0, 0>);
  launch(kernel, 1, 128, 16384, nullptr, swizzle, a, b, c);
}

void registers_product(int n, int plane, const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
  TensorMaps maps;
  const CUtensorMap& right =
      maps.of(boxed(b, n, 64, 64, n, 64, CU_TENSOR_MAP_SWIZZLE_128B, /*planes=*/4));
  const auto kernel = n == 64    ? registers_kernel<32>
                      : n == 128 ? registers_kernel<64>
                                 : registers_kernel<128>;
  launch(kernel, 1, 128, n * 128 + 8, nullptr, a, right, plane, c);
}

void turn(const __nv_bfloat16* x, __nv_bfloat16* y) {
  launch(turn_kernel, 1, 32, 512, nullptr, x, y);
}

}  // namespace usp::hopper
