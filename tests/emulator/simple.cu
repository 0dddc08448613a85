#include "kernels.h"

// Kernels of which it is known what they cost.
namespace usp::emulator::test {
namespace {

constexpr int kSide = 256, kTile = 32;

__global__ void add_kernel(int n, const float* __restrict__ x, float value, float* __restrict__ y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + value;
}

__global__ void copy_by_column(const float* x, float* y) {
  const int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
  y[row * kSide + column] = x[row * kSide + column];
}

__global__ void copy_by_row(const float* x, float* y) {
  const int row = blockIdx.x * kTile + threadIdx.x, column = blockIdx.y * kTile + threadIdx.y;
  y[row * kSide + column] = x[row * kSide + column];
}

__global__ void copy_float4s(const float4* x, float4* y, bool change) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float4 value = x[i];
  if (change) value.x = value.y + value.z * value.w;
  y[i] = value;
}

template <int Width>
__global__ void transpose(const float* x, float* y) {
  __shared__ float tile[kTile][Width];
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
  tile[threadIdx.y][threadIdx.x] = x[(row + threadIdx.y) * kSide + column + threadIdx.x];
  __syncthreads();
  y[(column + threadIdx.y) * kSide + row + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

__global__ void last_one_kernel(int* last) { atomicExch(last, static_cast<int>(threadIdx.x)); }

__global__ void histogram_kernel(int* bins) { atomicAdd(&bins[threadIdx.x % 4], 1); }

__global__ void branch_kernel(bool by_lane, float* y) {
  const int i = threadIdx.x;
  if ((by_lane ? i : i / 32) % 2 == 0) {
    y[i] = 1;
  } else {
    y[i] = rsqrtf(static_cast<float>(i));
  }
}

__global__ void matmul_tiled(int n, const float* a, const float* b, float* c) {
  __shared__ float left[kTile][kTile], right[kTile][kTile];
  const int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
  float sum = 0;
  for (int first = 0; first < n; first += kTile) {
    left[threadIdx.y][threadIdx.x] = a[row * n + first + threadIdx.x];
    right[threadIdx.y][threadIdx.x] = b[(first + threadIdx.y) * n + column];
    __syncthreads();
    for (int k = 0; k < kTile; ++k) sum += left[threadIdx.y][k] * right[k][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}

}  // namespace

cudaError_t add(cudaStream_t stream, int n, const float* x, float value, float* y) {
  const cudaLaunchConfig_t config{(n + 127) / 128, 128, 0, stream, nullptr, 0};
  return cudaLaunchKernelEx(&config, add_kernel, n, x, value, y);
}

void copy(Copy how, const float* x, float* y) {
  const dim3 grid(kSide / kTile, kSide / kTile), block(kTile, kTile);
  const auto vectors = [&](bool change) {
    launch(copy_float4s, kSide * kSide / 4 / 256, 256, reinterpret_cast<const float4*>(x),
           reinterpret_cast<float4*>(y), change);
  };
  switch (how) {
    case Copy::by_column:
      launch(copy_by_column, grid, block, x, y);
      break;
    case Copy::by_row:
      launch(copy_by_row, grid, block, x, y);
      break;
    case Copy::float4s:
      vectors(false);
      break;
    case Copy::changed_float4s:
      vectors(true);
      break;
    case Copy::transpose_32:
      launch(transpose<kTile>, grid, block, x, y);
      break;
    case Copy::transpose_33:
      launch(transpose<kTile + 1>, grid, block, x, y);
      break;
  }
}

void histogram(int* bins) { launch(histogram_kernel, 1, 32, bins); }

void last_one(int* last) { launch(last_one_kernel, 1, 64, last); }

void branch(bool by_lane, float* y) { launch(branch_kernel, 1, 64, by_lane, y); }

void matmul(int n, const float* a, const float* b, float* c) {
  launch(matmul_tiled, dim3(n / kTile, n / kTile), dim3(kTile, kTile), n, a, b, c);
}

}  // namespace usp::emulator::test
