#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>
#include <vector>

#include "cuda/errors.h"
#include "cuda/queue.h"

/// How a kernel is started and where a thread finds itself: the words that kernel files need beyond
/// CUDA's own. Two compilers read those files: nvcc, for GPUs, and a C++ compiler that finds the
/// tests' cuda_runtime.h instead of CUDA's and runs every thread on the CPU.
namespace usp::cuda {

inline constexpr int kWarp = 32;      ///< threads that run in step
inline constexpr int kThreads = 256;  ///< of a block, unless a kernel says otherwise
/// Dynamic shared memory that a block gets without asking for more.
inline constexpr int64_t kDefaultSharedBytes = 48 << 10;

/// The smallest number of groups of `size` that hold `count`.
constexpr int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

/// Shape of a launch: blocks in each direction, threads and dynamic shared memory of a block, and
/// what CUDA lets a launch ask for besides.
struct LaunchShape {
  Grid grid;
  int threads = kThreads;
  int64_t shared_bytes = 0;
  std::vector<cudaLaunchAttribute> attributes = {};
};

/// Enqueues kernel(arguments...). No blocks: nothing to do, where CUDA would report an error. A
/// function, because C++ cannot parse CUDA's <<<>>>. By reference, so that what is a
/// __grid_constant__ parameter, such as a tensor map, keeps its alignment on the way.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, const Queue& queue,
            const std::type_identity_t<Parameters>&... arguments) {
  const auto [x, y, z] = shape.grid;
  if (x == 0 || y == 0 || z == 0) return;
  const Launched launched{reinterpret_cast<const void*>(kernel), shape.grid, shape.threads,
                          queue.file, queue.line};
  check_grid(launched);
  if (shape.shared_bytes > kDefaultSharedBytes) {
    USP_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shape.shared_bytes)));
  }
  std::vector<cudaLaunchAttribute> attributes = shape.attributes;  // which CUDA wants to change
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = queue.stream;
  config.attrs = attributes.data();
  config.numAttrs = static_cast<unsigned>(attributes.size());
  check_launch(cudaLaunchKernelEx(&config, kernel, arguments...), launched);
}

/// The same for `blocks` blocks in a row.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
            const Queue& queue, const std::type_identity_t<Parameters>&... arguments) {
  launch(kernel, LaunchShape{{blocks}, threads, shared_bytes}, queue, arguments...);
}

/// The number of this thread in the whole grid.
__device__ inline int64_t thread_of_grid() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
/// The number of this thread's warp in the whole grid, of blocks that are whole warps.
__device__ inline int64_t warp_of_grid() { return thread_of_grid() / kWarp; }
/// The number of this thread in its warp.
__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
/// The number of this thread's warp in its block.
__device__ inline int warp() { return static_cast<int>(threadIdx.x) / kWarp; }

}  // namespace usp::cuda
