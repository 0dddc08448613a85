#include <c10/cuda/CUDAException.h>

#include "cuda/errors.h"

/// What a kernel file asks of the program around it: in an extension, errors are PyTorch's.
namespace usp::cuda {

void check(cudaError_t status, const char*, const char*, int) { C10_CUDA_CHECK(status); }
void check_launch(cudaError_t status, const Launched&) { C10_CUDA_CHECK(status); }
void check_grid(const Launched&) {}

}  // namespace usp::cuda
