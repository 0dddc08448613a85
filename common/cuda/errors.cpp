#include "cuda/errors.h"

#include "base/check.h"
#include "tensor/launches.h"
#include "tensor/runtime.h"

namespace usp::cuda {

namespace {

/// As "elementwise kernel, 12 blocks of 256 threads".
std::string text_of(const Launched& launched) {
  const char* name = nullptr;
  if (cudaFuncGetName(&name, launched.kernel) != cudaSuccess) name = "?";
  const auto [x, y, z] = launched.grid;
  const std::string blocks =
      y == 1 && z == 1 ? fmt::format("{}", x) : fmt::format("{} x {} x {}", x, y, z);
  return fmt::format("the launch of {}, {} blocks of {} threads,", name, blocks, launched.threads);
}

/// A kernel's failure is reported by whatever is called later, again and again.
const char* hint(cudaError_t status) {
  const bool by_kernel = status == cudaErrorIllegalAddress || status == cudaErrorLaunchFailure ||
                         status == cudaErrorMisalignedAddress || status == cudaErrorAssert;
  if (!by_kernel) return "";
  return "; it was this or any kernel before: CUDA_LAUNCH_BLOCKING=1 shows which";
}

}  // namespace

/// CUDA writes 12040 for 12.4.
std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

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
  if (status == cudaErrorDevicesUnavailable) {
    usage_error(
        "device=cuda: another process has this GPU for itself; try a rank for each GPU, nvidia-smi "
        "-c DEFAULT, or --device cpu");
  }
  if (status == cudaErrorUnsupportedPtxVersion) {
    int driver = 0, runtime = 0;
    static_cast<void>(cudaDriverGetVersion(&driver));
    static_cast<void>(cudaRuntimeGetVersion(&runtime));
    usage_error(
        "device=cuda: this GPU is newer than the kernels, and its driver, which knows CUDA up to "
        "{}, "
        "cannot translate those of CUDA {}; try a newer driver, or --device cpu",
        version_text(driver), version_text(runtime));
  }
  const Runtime* runtime = Runtime::find();
  fail("{} failed{} at {}:{}: {}{}", call,
       runtime == nullptr ? "" : fmt::format(" on rank {}", runtime->rank()), file, line,
       cudaGetErrorString(status), hint(status));
}

void check_launch(cudaError_t status, const Launched& launched) {
  ++launches;
  if (status == cudaSuccess) return;
  check(status, text_of(launched).c_str(), launched.file, launched.line);
}

void check_grid(const Launched& launched) {
  constexpr int kMostAcross = 65535;  // in the second and third direction
  const auto [x, y, z] = launched.grid;
  USP_CHECK(x <= INT32_MAX, "{} at {}:{}: CUDA counts at most {} blocks", text_of(launched),
            launched.file, launched.line, INT32_MAX);
  USP_CHECK(y <= kMostAcross && z <= kMostAcross,
            "{} at {}:{}: CUDA counts at most {} blocks in the second and third direction",
            text_of(launched), launched.file, launched.line, kMostAcross);
}

}  // namespace usp::cuda
