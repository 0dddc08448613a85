#include <cuda_bf16.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <thread>

#include "catch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"

using namespace usp::emulator;
using test::Array;

namespace {

/// What a child process that must not survive prints to stderr.
std::string last_words(const std::function<void()>& body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  close(ends[0]);
  int status;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WTERMSIG(status) == SIGSEGV);
  return text;
}

}  // namespace

TEST_CASE("a host that touches device memory dies and is told where") {
  const Array<float> x(std::vector<float>(100, 1));
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  float* address = x;
  const auto dies = [&](const std::function<void()>& body) {
    const std::string text = last_words(body);
    INFO(text);
    REQUIRE(text.find("host code touches device memory") != std::string::npos);
    REQUIRE(text.find("byte 12 of a block of 400 bytes") != std::string::npos);
  };
  dies([=] { _exit(static_cast<int>(*const_cast<volatile float*>(address + 3))); });
  dies([=] { *const_cast<volatile float*>(address + 3) = 1; });
}

TEST_CASE("memory ends where the options say") {
  Options now;
  now.device_memory = 1 << 20;
  const Use use(now);
  size_t free = 0, total = 0;
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  REQUIRE(total == 1 << 20);
  REQUIRE(free == total);
  float *x, *y;
  REQUIRE(cudaMalloc(&x, 600 << 10) == cudaSuccess);
  REQUIRE(cudaMalloc(&y, 600 << 10) == cudaErrorMemoryAllocation);
  REQUIRE(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
  REQUIRE(cudaGetLastError() == cudaErrorMemoryAllocation);
  REQUIRE(cudaGetLastError() == cudaSuccess);
  REQUIRE(cudaFree(x) == cudaSuccess);
  REQUIRE(cudaMalloc(&y, 600 << 10) == cudaSuccess);
  REQUIRE(cudaFree(y) == cudaSuccess);
  REQUIRE(cudaFree(y) == cudaErrorInvalidValue);
}

TEST_CASE("drivers and devices that cannot be used say so") {
  Options now;
  int count = 7;
  float* x;
  const auto error = [&](auto change) {
    Options other = now;
    change(other);
    const Use use(other);
    REQUIRE(cudaGetDeviceCount(&count) == cudaMalloc(&x, 4));
    return cudaGetLastError();
  };
  REQUIRE(error([](Options& o) { o.driver_version = 12040; }) == cudaErrorInsufficientDriver);
  REQUIRE(error([](Options& o) { o.driver_version = 0; }) == cudaErrorInsufficientDriver);
  REQUIRE(error([](Options& o) { o.device_count = 0; }) == cudaErrorNoDevice);
  REQUIRE(count == 0);
  REQUIRE(std::string(cudaGetErrorString(cudaErrorNoDevice)) ==
          "no CUDA-capable device is detected");

  now.device_count = 2;
  now.compute_capability = 75;
  now.kernels_need_capability = 80;
  const Use use(now);
  REQUIRE(cudaSetDevice(2) == cudaErrorInvalidDevice);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  int major = 0, minor = 0;
  REQUIRE(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 1) == cudaSuccess);
  REQUIRE(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 1) == cudaSuccess);
  REQUIRE(10 * major + minor == 75);
  const Array<float> y(1);
  REQUIRE(test::add(nullptr, 1, y, 1, y) == cudaErrorNoKernelImageForDevice);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  cudaGetLastError();
}

TEST_CASE("launches, copies and handles that are wrong are refused") {
  const Array<float> x(std::vector<float>(64, 1)), y(64);
  REQUIRE(test::add(nullptr, 0, x, 1, y) == cudaErrorInvalidConfiguration);  // no blocks
  float host[64] = {};
  REQUIRE(cudaMemcpy(host, x, 256, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  REQUIRE(cudaMemcpy(x, host, 257, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  REQUIRE(cudaMemcpy(host, host, 4, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  REQUIRE(cudaMemcpy(host, x, 256, cudaMemcpyDefault) == cudaSuccess);
  REQUIRE(host[63] == 1);
  cudaStream_t stream;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
  REQUIRE(cudaGetLastError() == cudaErrorInvalidResourceHandle);
}

TEST_CASE("rows are copied with their pitches") {
  std::vector<int> from(12), to(8, -1);
  for (int i = 0; i < 12; ++i) from[i] = i;
  const Array<int> x(from);
  REQUIRE(cudaMemcpy2DAsync(to.data(), 16, x + 1, 24, 8, 2, cudaMemcpyDeviceToHost) == cudaSuccess);
  REQUIRE(to == std::vector<int>{1, 2, -1, -1, 7, 8, -1, -1});
  REQUIRE(cudaMemcpy2DAsync(to.data(), 4, x, 24, 8, 2, cudaMemcpyDeviceToHost) ==
          cudaErrorInvalidPitchValue);
  const Array<int> unwritten(4);
  REQUIRE(cudaMemcpy(to.data(), unwritten, 16, cudaMemcpyDeviceToHost) == cudaErrorLaunchFailure);
  REQUIRE(take_report().has("uninitialised"));
  cudaGetLastError();
}

TEST_CASE("bfloat16 rounds to nearest even") {
  REQUIRE(__bfloat162float(__float2bfloat16(1 + 0x1p-8f)) == 1);            // a tie
  REQUIRE(__bfloat162float(__float2bfloat16(1 + 0x3p-8f)) == 1 + 0x1p-6f);  // a tie
  REQUIRE(__bfloat162float(__float2bfloat16(1 + 0x1.1p-8f)) == 1 + 0x1p-7f);
  REQUIRE(__bfloat162float(__double2bfloat16(1 + 0x1p-8 + 0x1p-40)) == 1 + 0x1p-7f);
  REQUIRE(__bfloat16_as_ushort(__float2bfloat16(NAN)) == 0x7fff);
  REQUIRE(std::isinf(__bfloat162float(__float2bfloat16(3.4e38f))));
}

TEST_CASE("a thread begins with device 0, and uses no stream or event of another") {
  Options now;
  now.device_count = 2;
  const Use use(now);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  cudaStream_t stream;
  cudaEvent_t event;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  const Array<float> x(8);
  std::vector<cudaError_t> errors;
  std::thread other([&] {
    errors = {add(stream, 8, x, 1, x),        cudaMemsetAsync(x, 0, 32, stream),
              cudaEventRecord(event, stream), cudaEventQuery(event),
              cudaStreamQuery(stream),        cudaStreamSynchronize(stream)};
  });
  other.join();
  REQUIRE(errors == std::vector<cudaError_t>(6, cudaErrorInvalidResourceHandle));
  const Report report = take_report();
  REQUIRE(report.problems.size() == 6);
  REQUIRE(report.has("device"));
  REQUIRE(report.text().find("a launch on device 1 by a thread that has set device 0") !=
          std::string::npos);
  std::thread with_device([&] {
    cudaSetDevice(1);
    errors = {cudaMemsetAsync(x, 0, 32, stream), add(stream, 8, x, 1, x),
              cudaEventRecord(event, stream), cudaStreamSynchronize(stream), cudaEventQuery(event)};
  });
  with_device.join();
  REQUIRE(errors == std::vector<cudaError_t>(5, cudaSuccess));
  cudaEventDestroy(event);
  cudaStreamDestroy(stream);
  cudaSetDevice(0);
  REQUIRE(take_report().problems.empty());
}

TEST_CASE("after a kernel's error nothing more is launched, until the report is taken") {
  const Array<float> x(std::vector<float>(8, 1));
  for (const test::Case& planted : test::planted_bugs()) {
    if (std::string(planted.kind) == "out of bounds") {
      planted.run();
      break;
    }
  }
  REQUIRE(add(nullptr, 8, x, 1, x) == cudaErrorLaunchFailure);
  REQUIRE(take_report().has("out of bounds"));
  REQUIRE(add(nullptr, 8, x, 1, x) == cudaSuccess);
  REQUIRE(x.host()[0] == 2);
  setenv("CUDA_LAUNCH_BLOCKING", "1", /*replace=*/1);
  REQUIRE(add(nullptr, 8, x, 1, x) == cudaSuccess);
  unsetenv("CUDA_LAUNCH_BLOCKING");
  const char* name = nullptr;
  REQUIRE(cudaFuncGetName(&name, reinterpret_cast<const void*>(&test::add)) == cudaSuccess);
  REQUIRE(std::string(name) == "simple.cu:add");
  cudaGetLastError();
}
