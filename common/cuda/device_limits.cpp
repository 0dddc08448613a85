#include "cuda/device_limits.h"

#include "cuda/errors.h"

namespace usp::cuda {

DeviceLimits limits_of_this_device() {
  int device = 0, shared_bytes = 0, major = 0, minor = 0, multiprocessors = 0;
  USP_CUDA(cudaGetDevice(&device));
  USP_CUDA(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  USP_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  USP_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  USP_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return {shared_bytes, 10 * major + minor, multiprocessors};
}

}  // namespace usp::cuda
