#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "tensor/backend.h"

namespace usp {

namespace cuda {

/// Products that cuBLASLt had no kernel for.
struct MatmulDetours {
  int64_t by_copies = 0, by_own_kernel = 0;
};

/// Calls of attention since Backend::fuse() asked for other kernels than the blockwise ones: by
/// those, if any take heads on this GPU, and by the blockwise ones all the same.
struct AttentionCalls {
  std::string forward_by, decoding_by, backward_by;  ///< the kernels' names; empty: there are none
  /// decoding: forward, with one query for each sample.
  int64_t forward = 0, decoding = 0, backward = 0, blockwise = 0;
};

/// What a device counts of its backend's work, and what outlives that one.
struct BackendCounts {
  MatmulDetours detours;
  AttentionCalls attention;
};

}  // namespace cuda

/// The kernels for NVIDIA GPUs: cuBLASLt for matrix products, common/cuda for the rest, and those
/// that a program adds (attention_kernels.h). All work is enqueued on `stream`, and no operation
/// waits for it. Two runs give the same bits.
std::unique_ptr<Backend> make_cuda_backend(cudaStream_t stream, cuda::BackendCounts& counts);

}  // namespace usp
