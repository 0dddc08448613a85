#pragma once

#include <cuda_runtime.h>

namespace usp::cuda {

/// Throws Error, with the call, its place and the rank, unless `status` says success; UsageError
/// where the program has no kernels for this GPU.
void check(cudaError_t status, const char* call, const char* file, int line);

}  // namespace usp::cuda

/// A call of the CUDA runtime that must succeed.
#define USP_CUDA(call) ::usp::cuda::check((call), #call, __FILE__, __LINE__)
