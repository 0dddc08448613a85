#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "tensor/backend.h"

namespace usp {

namespace cuda {

/// Products that cuBLASLt had no kernel for.
struct MatmulDetours {
  int64_t by_copies = 0, by_own_kernel = 0;
};

}  // namespace cuda

/// The kernels for NVIDIA GPUs: cuBLASLt for matrix products, common/cuda for the rest. All work is
/// enqueued on `stream`, and no operation waits for it. Two runs give the same bits. `detours` are
/// counted, and outlive it.
std::unique_ptr<Backend> make_cuda_backend(cudaStream_t stream, cuda::MatmulDetours& detours);

}  // namespace usp
