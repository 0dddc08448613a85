#include "base/check.h"
#include "tensor/device.h"

namespace usp {

/// In the library, so that a program takes it only where its own objects define no other.
std::shared_ptr<Accelerator> make_cuda_device(int /*rank*/) {
  usage_error(
      "device=cuda: this program was built without CUDA; try --device cpu, or configure the build "
      "with -DUSP_CUDA=ON where nvcc is");
}

}  // namespace usp
