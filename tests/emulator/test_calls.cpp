#include <cublasLt.h>
#include <nccl.h>

#include <functional>

#include "catch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"

using namespace usp::emulator;
using test::Array;

namespace {

constexpr int kSide = 16, kCount = kSide * kSide;
constexpr size_t kBytes = kCount * sizeof(float);

/// Something that a stream does with the elements of `x`, and with scratch of its own.
struct Work {
  const char* name;
  bool writes;
  std::function<cudaError_t(cudaStream_t, float* x, float* scratch)> queue;
};

/// D = A A, kSide x kSide.
cudaError_t multiply(cudaStream_t stream, const float* a, float* d) {
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t layout;
  cublasLtCreate(&handle);
  cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, kSide, kSide, kSide);
  const float alpha = 1, beta = 0;
  const cublasStatus_t status = cublasLtMatmul(handle, desc, &alpha, a, layout, a, layout, &beta, d,
                                               layout, d, layout, nullptr, nullptr, 0, stream);
  cublasLtMatrixLayoutDestroy(layout);
  cublasLtMatmulDescDestroy(desc);
  cublasLtDestroy(handle);
  return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// A communicator of one rank.
class Alone {
 public:
  Alone() {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    REQUIRE(ncclCommInitRank(&comm_, 1, id, 0) == ncclSuccess);
  }
  ~Alone() { ncclCommDestroy(comm_); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

  cudaError_t gather_in_place(cudaStream_t stream, float* x) const {
    const ncclResult_t result = ncclAllGather(x, x, kCount, ncclFloat32, comm_, stream);
    return result == ncclSuccess ? cudaSuccess : cudaErrorInvalidValue;
  }
  cudaError_t sum(cudaStream_t stream, const float* from, float* to) const {
    const ncclResult_t result =
        ncclAllReduce(from, to, kCount, ncclFloat32, ncclSum, comm_, stream);
    return result == ncclSuccess ? cudaSuccess : cudaErrorInvalidValue;
  }

 private:
  ncclComm_t comm_;
};

}  // namespace

TEST_CASE("copies, fills, products and NCCL race with what no event orders, as kernels do") {
  const Alone comm;
  float* pinned;
  REQUIRE(cudaMallocHost(&pinned, 2 * kBytes) == cudaSuccess);
  const auto copy = [](cudaStream_t stream, float* to, const float* from) {
    return cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream);
  };
  const Work uses[] = {
      {"a kernel", false,
       [](auto stream, auto* x, auto* y) { return test::add(stream, kCount, x, 1, y); }},
      {"a kernel", true,
       [](auto stream, auto* x, auto* y) { return test::add(stream, kCount, y, 1, x); }},
      {"a copy", false, [&](auto stream, auto* x, auto*) { return copy(stream, pinned, x); }},
      {"a copy", true,
       [&](auto stream, auto* x, auto*) { return copy(stream, x, pinned + kCount); }},
      {"a copy", false, [&](auto stream, auto* x, auto* y) { return copy(stream, y, x); }},
      {"a copy", true, [&](auto stream, auto* x, auto* y) { return copy(stream, x, y); }},
      {"a fill", true,
       [](auto stream, auto* x, auto*) { return cudaMemsetAsync(x, 0, kBytes, stream); }},
      {"cublasLtMatmul", false,
       [](auto stream, auto* x, auto* y) { return multiply(stream, x, y); }},
      {"cublasLtMatmul", true,
       [](auto stream, auto* x, auto* y) { return multiply(stream, y, x); }},
      {"ncclAllReduce", false,
       [&](auto stream, auto* x, auto* y) { return comm.sum(stream, x, y); }},
      {"ncclAllReduce", true,
       [&](auto stream, auto* x, auto* y) { return comm.sum(stream, y, x); }},
      {"ncclAllGather", false,
       [&](auto stream, auto* x, auto*) { return comm.gather_in_place(stream, x); }},
      {"the allocator", true,
       [](auto stream, auto* x, auto*) { return mark_undefined(x, kBytes, stream); }},
  };
  cudaStream_t streams[2];
  cudaEvent_t event;
  for (cudaStream_t& stream : streams) {
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  }
  REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  for (const Order order : {Order::forward, Order::reverse}) {
    Options now;
    now.streams = order;
    const Use use(now);
    for (const Work& first : uses) {
      for (const Work& second : uses) {
        for (const bool ordered : {false, true}) {
          const std::vector<float> ones(kCount, 1);
          const Array<float> x(ones), y(ones), z(ones);
          REQUIRE(first.queue(streams[0], x, y) == cudaSuccess);
          if (ordered) {
            REQUIRE(cudaEventRecord(event, streams[0]) == cudaSuccess);
            REQUIRE(cudaStreamWaitEvent(streams[1], event) == cudaSuccess);
          }
          REQUIRE(second.queue(streams[1], x, z) == cudaSuccess);
          const Report report = take_report();
          INFO(first.name << ", then " << second.name << (ordered ? ", ordered" : "") << "\n"
                          << report.text());
          // What the allocator takes back has no value for anybody, which is another problem.
          const bool race = (first.writes || second.writes) && !ordered;
          REQUIRE(report.has("race") == race);
          for (const Problem& problem : report.problems) {
            if (problem.kind != "race") continue;
            const Work& earlier = order == Order::forward ? first : second;
            const Work& later = order == Order::forward ? second : first;
            REQUIRE(problem.detail.find(std::string("that ") + earlier.name +
                                        " of another stream") != std::string::npos);
            const bool kernel = std::string(later.name) == "a kernel";
            REQUIRE(problem.detail.starts_with(kernel ? "" : later.name));
            REQUIRE(problem.file == (kernel ? "simple.cu" : "test_calls.cpp"));
            REQUIRE(problem.line > 0);
          }
        }
      }
    }
  }
  for (cudaStream_t stream : streams) REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
  REQUIRE(cudaEventDestroy(event) == cudaSuccess);
  REQUIRE(cudaFreeHost(pinned) == cudaSuccess);
}
