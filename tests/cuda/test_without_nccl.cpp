#include "tensor/device.h"
#include "tensor/device_group.h"
#include "testing.h"

/// The device as it is where the build has found no nccl.h.
namespace usp::test {
namespace {

TEST_CASE("a program that was built without NCCL says so") {
  const std::shared_ptr<Accelerator> device = make_cuda_device(0);
  check_throws<UsageError>([&] { dynamic_cast<DeviceLibrary&>(*device).require(); },
                           {"comm=nccl", "built without NCCL", "--comm mpi"});
}

}  // namespace
}  // namespace usp::test
