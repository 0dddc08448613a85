#include <cuda_runtime.h>
#include <stdlib.h>

#include <cstdio>

/// Linked into an executable, makes a GPU the device of its tests. Where there is none, the program
/// ends with the code that ctest takes for a test left out.
namespace usp::test {
namespace {

constexpr int kSkipped = 77;

[[maybe_unused]] const bool on_gpu = [] {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    std::printf("skipped: there is no GPU here (%s)\n", cudaGetErrorString(status));
    std::fflush(stdout);
    _Exit(kSkipped);
  }
  return setenv("USP_TEST_DEVICE", "cuda", /*replace=*/1) == 0;
}();

}  // namespace
}  // namespace usp::test
