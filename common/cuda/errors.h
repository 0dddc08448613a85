#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace usp::cuda {

/// As CUDA's versions are written: "12.4" for 12040.
std::string version_text(int version);

/// Throws Error, with the call, its place and the rank, unless `status` says success; UsageError
/// where the program has no kernels for this GPU.
void check(cudaError_t status, const char* call, const char* file, int line);

/// Blocks of a launch in each direction.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
};
/// A kernel that was to be started, for messages.
struct Launched {
  const void* kernel;
  Grid grid;
  int64_t threads;
  const char* file;  ///< where
  int line;
};
/// Throws Error, with the kernel, its grid and the caller, unless it could be queued.
void check_launch(cudaError_t status, const Launched& launched);
/// Throws Error if a grid has more blocks than CUDA counts, which a launch would cut off.
void check_grid(const Launched& launched);

}  // namespace usp::cuda

/// A call of the CUDA runtime that must succeed.
#define USP_CUDA(call) ::usp::cuda::check((call), #call, __FILE__, __LINE__)
