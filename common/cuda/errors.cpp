#include "cuda/errors.h"

#include "base/check.h"
#include "tensor/runtime.h"

namespace usp::cuda {

void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  if (status == cudaErrorNoKernelImageForDevice) {
    int device = 0;
    cudaDeviceProp properties{};
    static_cast<void>(cudaGetDevice(&device));
    static_cast<void>(cudaGetDeviceProperties(&properties, device));
    usage_error(
        "device=cuda: this program has no kernels for this GPU, {} of compute capability {}.{}; "
        "build "
        "it with -DCMAKE_CUDA_ARCHITECTURES={}{}, or try --device cpu",
        properties.name, properties.major, properties.minor, properties.major, properties.minor);
  }
  const Runtime* runtime = Runtime::find();
  fail("{} failed{} at {}:{}: {}", call,
       runtime == nullptr ? "" : fmt::format(" on rank {}", runtime->rank()), file, line,
       cudaGetErrorString(status));
}

}  // namespace usp::cuda
