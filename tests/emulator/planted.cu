#include "kernels.h"

// Kernels with one mistake each. A race may be noticed at either of its two accesses.
namespace usp::emulator::test {
namespace {

constexpr int kThreads = 64;

std::vector<float> ones(int n) { return std::vector<float>(n, 1); }

/// Runs a kernel of one block that reads 64 floats and writes as many.
template <void (*Kernel)(const float*, float*)>
void one_block() {
  const Array<float> x(ones(kThreads)), y(kThreads);
  launch(Kernel, 1, kThreads, x, y);
  cudaDeviceSynchronize();
}

__global__ void no_barrier(const float* x, float* y) {
  __shared__ float row[kThreads];
  const int i = threadIdx.x;
  row[i] = x[i];                 // bug: no barrier
  y[i] = row[kThreads - 1 - i];  // bug: no barrier
}

__global__ void no_syncwarp(const float* x, float* y) {
  __shared__ float sums[kThreads];
  const int i = threadIdx.x;
  sums[i] = x[i];
  __syncthreads();
  for (int half = 16; half > 0; half /= 2) {
    if (i % 32 < half) sums[i] += sums[i + half];  // bug: no syncwarp
  }
  y[i] = sums[i];  // bug: no syncwarp
}

__global__ void no_syncwarp_in_group(const float* x, float* y) {
  __shared__ float row[kThreads];
  const int i = threadIdx.x;
  row[i] = x[i];       // bug: no syncwarp in group
  y[i] = row[i ^ 15];  // bug: no syncwarp in group
}

__global__ void one_buffer(const float* x, float* y) {
  __shared__ float buffer[kThreads];
  const int i = threadIdx.x;
  float sum = 0;
  for (int step = 0; step < 3; ++step) {
    buffer[i] = x[i] + static_cast<float>(step);  // bug: one buffer
    __syncthreads();
    sum += buffer[kThreads - 1 - i];  // bug: one buffer
  }
  y[i] = sum;
}

__global__ void no_guard(const float* x, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i];  // bug: no guard
}

__global__ void early_return(const float* x, float* y) {
  __shared__ float row[kThreads];
  const int i = threadIdx.x;
  row[i] = x[i];
  if (i >= 40) return;
  __syncthreads();  // bug: early return
  y[i] = row[i];
}

__global__ void two_barriers(const float* x, float* y) {
  const int i = threadIdx.x;
  if (i < 32) {
    __syncthreads();  // bug: two barriers
    y[i] = x[i];
  } else {
    __syncthreads();  // bug: two barriers
    y[i] = 2 * x[i];
  }
}

__global__ void full_mask(const float* x, float* y) {
  const int i = threadIdx.x;
  float value = x[i];
  if (i % 32 < 16) value += __shfl_xor_sync(0xffffffff, value, 1);  // bug: full mask
  y[i] = value;
}

__global__ void absent_source(const float* x, float* y) {
  const int i = threadIdx.x;
  float value = x[i];
  if (i % 32 < 16) value += __shfl_xor_sync(0x0000ffff, value, 16);  // bug: absent source
  y[i] = value;
}

__global__ void uninitialised_shared(const float* x, float* y) {
  __shared__ float row[kThreads + 1];
  const int i = threadIdx.x;
  row[i] = x[i];
  __syncthreads();
  y[i] = row[i + 1];  // bug: uninitialised shared
}

__global__ void blocks_share_a_word(const float* x, float* y) {
  if (threadIdx.x == 0) y[0] = x[blockIdx.x];  // bug: blocks share a word
}

__global__ void dynamic_overrun(const float* x, float* y) {
  float* row = static_cast<float*>(dynamic_shared_memory());
  const int i = threadIdx.x;
  row[i] = x[i];  // bug: dynamic overrun
  y[i] = x[i];
}

__global__ void copy_float4s(const float4* x, float4* y) {
  y[threadIdx.x] = x[threadIdx.x];  // bug: misaligned
}

__global__ void copy(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x];  // bug: uninitialised global, bug: host pointer, bug: freed
}

void run_no_guard() {
  const Array<float> x(ones(100)), y(100);
  launch(no_guard, 2, kThreads, x, y);
  cudaDeviceSynchronize();
}

void run_blocks_share_a_word() {
  const Array<float> x(ones(8)), y(1);
  launch(blocks_share_a_word, 8, 32, x, y);
  cudaDeviceSynchronize();
}

void run_dynamic_overrun() {
  const Array<float> x(ones(kThreads)), y(kThreads);
  const cudaLaunchConfig_t config{1, kThreads, 4 * (kThreads - 1), nullptr, nullptr, 0};
  cudaLaunchKernelEx(&config, dynamic_overrun, x, y);
  cudaDeviceSynchronize();
}

void run_misaligned() {
  const Array<float> x(ones(5)), y(4);
  launch(copy_float4s, 1, 1, reinterpret_cast<const float4*>(x + 1), reinterpret_cast<float4*>(+y));
  cudaDeviceSynchronize();
}

void run_uninitialised_global() {
  const Array<float> x(kThreads), y(kThreads);
  launch(copy, 1, kThreads, x, y);
  cudaDeviceSynchronize();
}

void run_undefined_again() {
  const Array<float> x(ones(kThreads)), y(kThreads);
  mark_undefined(x, 4, nullptr);
  launch(copy, 1, kThreads, x, y);
  cudaDeviceSynchronize();
}

void run_host_pointer() {
  const std::vector<float> x = ones(kThreads);
  const Array<float> y(kThreads);
  launch(copy, 1, kThreads, x.data(), y);
  cudaDeviceSynchronize();
}

void run_freed() {
  const Array<float> y(kThreads);
  float* gone;
  {
    const Array<float> x(ones(kThreads));
    gone = x;
  }
  launch(copy, 1, kThreads, gone, y);
  cudaDeviceSynchronize();
}

constexpr Case kPlanted[] = {
    {"no barrier", "race", one_block<no_barrier>},
    {"no syncwarp", "race", one_block<no_syncwarp>},
    {"no syncwarp in group", "race", one_block<no_syncwarp_in_group>},
    {"one buffer", "race", one_block<one_buffer>},
    {"blocks share a word", "race", run_blocks_share_a_word},
    {"no guard", "out of bounds", run_no_guard},
    {"dynamic overrun", "out of bounds", run_dynamic_overrun},
    {"freed", "out of bounds", run_freed},
    {"host pointer", "host memory", run_host_pointer},
    {"misaligned", "misaligned", run_misaligned},
    {"early return", "divergent barrier", one_block<early_return>},
    {"two barriers", "divergent barrier", one_block<two_barriers>},
    {"full mask", "deadlock", one_block<full_mask>},
    {"absent source", "mask", one_block<absent_source>},
    {"uninitialised shared", "uninitialised", one_block<uninitialised_shared>},
    {"uninitialised global", "uninitialised", run_uninitialised_global},
    {"uninitialised global", "uninitialised", run_undefined_again},
};

// Nothing is wrong with these.

__global__ void two_buffers(const float* x, float* y) {
  __shared__ float buffers[2][kThreads];
  const int i = threadIdx.x;
  float sum = 0;
  for (int step = 0; step < 4; ++step) {
    buffers[step % 2][i] = x[i] + static_cast<float>(step);
    __syncthreads();
    sum += buffers[step % 2][kThreads - 1 - i];
  }
  y[i] = sum;
}

__global__ void groups_of_16(const float* x, float* y) {
  __shared__ float row[kThreads];
  const int i = threadIdx.x;
  const unsigned group = i % 32 < 16 ? 0x0000ffff : 0xffff0000;
  row[i] = x[i];
  __syncwarp(group);
  y[i] = row[i ^ 15];
}

__global__ void two_stages(const float* x, float* y) {
  __shared__ float of_warp[kThreads / 32];
  const int i = threadIdx.x;
  float sum = x[i];
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xffffffff, sum, lanes);
  if (i % 32 == 0) of_warp[i / 32] = sum;
  __syncthreads();
  float total = 0;
  for (float part : of_warp) total += part;
  y[i] = total;
}

__global__ void bytes_of_a_word(const float* x, float* y) {
  __shared__ unsigned char bytes[kThreads];
  const int i = threadIdx.x;
  bytes[i] = static_cast<unsigned char>(x[i]);
  __syncthreads();
  y[i] = bytes[i ^ 1];
}

__global__ void shuffles_in_branches(const float* x, float* y) {
  const int i = threadIdx.x;
  float value = x[i];
  if (i % 32 < 16) {
    value += __shfl_xor_sync(0x0000ffff, value, 3);
  } else {
    for (int lanes = 8; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffff0000, value, lanes);
  }
  y[i] = value;
}

__global__ void atomics(const float* x, float* y) {
  __shared__ float sum;
  const int i = threadIdx.x;
  if (i == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, x[i]);
  __syncthreads();
  y[i] = sum;
}

constexpr Case kCorrect[] = {
    {"two buffers", "", one_block<two_buffers>},
    {"groups of 16", "", one_block<groups_of_16>},
    {"two stages", "", one_block<two_stages>},
    {"bytes of a word", "", one_block<bytes_of_a_word>},
    {"shuffles in branches", "", one_block<shuffles_in_branches>},
    {"atomics", "", one_block<atomics>},
};

}  // namespace

std::span<const Case> planted_bugs() { return kPlanted; }
std::span<const Case> correct_kernels() { return kCorrect; }

}  // namespace usp::emulator::test
