#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "tensor/backend.h"

namespace usp {

/// The kernels for NVIDIA GPUs: cuBLASLt for matrix products, common/cuda for the rest. All work is
/// enqueued on `stream`, and no operation waits for it. Two runs give the same bits.
std::unique_ptr<Backend> make_cuda_backend(cudaStream_t stream);

}  // namespace usp
