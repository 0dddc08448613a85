// Listeners are no part of what catch.h includes.
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
#else
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>
#endif

#include <cuda_runtime.h>
#include <stdlib.h>

#include <cstdio>

/// Linked into an executable, makes a GPU the device of its tests. Where there is none, the program
/// ends with the code that ctest takes for a test left out. It asks when the tests begin: CUDA may
/// not be called while a program's statics are still being made.
namespace usp::test {
namespace {

constexpr int kSkipped = 77;

#if __has_include(<catch2/catch_test_macros.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

class OnGpu : public Listener {
 public:
  using Listener::Listener;

  void testRunStarting(const Catch::TestRunInfo&) override {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
      std::printf("skipped: there is no GPU here (%s)\n", cudaGetErrorString(status));
      std::fflush(stdout);
      _Exit(kSkipped);
    }
    setenv("USP_TEST_DEVICE", "cuda", /*replace=*/1);
  }
};

CATCH_REGISTER_LISTENER(OnGpu)

}  // namespace
}  // namespace usp::test
