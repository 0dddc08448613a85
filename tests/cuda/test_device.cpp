#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <numeric>

#include "common/attention_case.h"
#include "cuda/errors.h"
#include "emulator/emulator.h"
#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

/// Numbers that every dtype holds exactly.
Values numbers(int64_t count, int64_t first = 0) {
  Values values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = double((first + i) % 101);
  return values;
}

TEST_CASE("values go up and come back, in every dtype and by any strides") {
  OnDevice gpu(Device::cuda);
  for (DType dtype : kFloatDTypes) {
    const Tensor x = Tensor::from_host(numbers(24), {2, 3, 4}, dtype);
    REQUIRE(x.device() == Device::cuda);
    REQUIRE(x.items() == numbers(24));
    REQUIRE(x.item(7) == 7);
    const Tensor part = x.narrow(2, 1, 2).transposed();  // [2, 2, 3]
    REQUIRE(part.items() == Values{1, 5, 9, 2, 6, 10, 13, 17, 21, 14, 18, 22});
    REQUIRE(part.item(4) == 6);
    REQUIRE(same_bits(part, part.to_contiguous()));
    Tensor(part).assign(numbers(12, 50));
    REQUIRE(x.item(1) == 50);
    REQUIRE(x.item(5) == 51);
    REQUIRE(x.item(0) == 0);
    REQUIRE(part.items() == numbers(12, 50));
  }
  REQUIRE(Tensor::zeros({5}, DType::f32).items() == Values(5));
  const Tensor counts = Tensor::from_host(std::vector<int32_t>{3, 1, 4, 1}, {2, 2});
  REQUIRE(counts.counts() == std::vector<int64_t>{3, 1, 4, 1});
  REQUIRE(counts.transposed().counts() == std::vector<int64_t>{3, 4, 1, 1});
  REQUIRE(Tensor::zeros({0, 3}, DType::f64).items().empty());
}

TEST_CASE("a host buffer may change as soon as its values were handed over") {
  emulator::Options options = emulator::options;
  options.streams =
      GENERATE(emulator::Order::forward, emulator::Order::reverse, emulator::Order::shuffled);
  const emulator::Use use(options);
  OnDevice gpu(Device::cuda);
  std::vector<int32_t> batch(1000);
  std::vector<Tensor> tensors;
  for (int32_t i = 0; i < 20; ++i) {
    std::ranges::fill(batch, i);
    tensors.push_back(Tensor::from_host(batch, {1000}));
  }
  for (int32_t i = 0; i < 20; ++i) REQUIRE(tensors[i].items() == Values(1000, i));
}

TEST_CASE("more than all pinned buffers hold goes up whole, and the host waits for some of them") {
  OnDevice gpu(Device::cuda);
  std::vector<int32_t> values((160 << 20) / 4);  // 160 MiB; the ring has 64
  std::iota(values.begin(), values.end(), 0);
  const int64_t before = gpu.runtime.accelerator()->waits();
  const Tensor x = Tensor::from_host(values, {std::ssize(values)});
  REQUIRE(gpu.runtime.accelerator()->waits() > before);
  const Tensor host = x.to_host();
  const bool equal = std::ranges::equal(values, std::span(host.data<int32_t>(), values.size()));
  REQUIRE(equal);
}

TEST_CASE("the host waits where it reads, and nowhere else") {
  OnDevice gpu(Device::cuda);
  Accelerator& accelerator = *gpu.runtime.accelerator();
  const int64_t before = accelerator.waits();
  {
    const NoHostReads no_host_reads;
    const Tensor a = Tensor::from_host(numbers(6), {2, 3}, DType::f32);
    const Tensor b = Tensor::zeros({2, 3}, DType::f32), c = Tensor::empty({2, 2}, DType::f32);
    ops::add(b, a, a);
    ops::matmul(c, a, b.transposed());
    ops::fill(b, 3);
    REQUIRE(accelerator.waits() == before);
    check_throws<Error>([&] { c.item(); }, {"item() inside a training step"});
    check_throws<Error>([&] { c.to_host(); }, {"item() inside a training step"});
    REQUIRE(Tensor::from_host(std::vector<int32_t>{5}, {1}).counts()[0] == 5);
    REQUIRE(accelerator.waits() == before + 1);
  }
  REQUIRE(Tensor::zeros({1}, DType::f64).item() == 0);
  REQUIRE(accelerator.waits() == before + 2);
}

TEST_CASE("an op's operands lie on one device, and host tensors have the host's kernels") {
  OnDevice gpu(Device::cuda);
  const Tensor there = Tensor::zeros({2}, DType::f64);
  const Tensor here = [] {
    const HostScope on_host;
    return Tensor::from_host(numbers(2, 3), {2}, DType::f64);
  }();
  REQUIRE(here.device() == Device::cpu);
  REQUIRE(gpu.allocator().live_bytes() == 16);  // of `there` alone
  check_throws<Error>([&] { ops::add(there, there, here); }, {"add", "cuda", "cpu"});
  check_throws<Error>([&] { ops::sum_squares(there.narrow(0, 0, 1), here); },
                      {"sum_squares", "cuda", "cpu"});
  ops::add(here, here, here);
  REQUIRE(here.items() == Values{6, 8});
  REQUIRE(here.data<double>()[1] == 8);
}

TEST_CASE("a profiler is told of phases and operations, whether they are recorded or not") {
  OnDevice gpu(Device::cuda);
  for (bool recorded : {false, true}) {
    gpu.runtime.tracer().record(recorded);
    const TraceScope phase("phase");
    ops::fill(Tensor::empty({3}, DType::f32), 1);
    {
      const TraceScope block("block", {.number = 12});
      const TraceScope op("add", "op");
      REQUIRE(emulator::open_ranges == std::vector<std::string>{"phase", "block 12", "add"});
    }
    REQUIRE(emulator::open_ranges == std::vector<std::string>{"phase"});
  }
  REQUIRE(emulator::open_ranges.empty());
  gpu.runtime.tracer().record(false);
}

TEST_CASE("a device that is full says what for, how much, and what lives there") {
  emulator::Options options = emulator::options;
  options.device_memory = 1 << 20;
  const emulator::Use use(options);
  OnDevice gpu(Device::cuda);
  const Tensor small = Tensor::zeros({1000}, DType::f32);
  const CategoryScope scope(Category::gradients);
  check_throws<Error>([] { Tensor::empty({1 << 20}, DType::f32, "qkv"); },
                      {"out of memory on cuda", "4194304 bytes", "gradients, qkv",
                       "4000 of activations", "left on the device", "--micro_batch_size"});
  REQUIRE(small.items() == Values(1000));  // the device goes on
}

TEST_CASE("each reason why there is no GPU has a line of its own") {
  emulator::Options options = emulator::options;
  options.driver_version = 0;
  std::vector<std::string> parts = {"device=cuda", "no NVIDIA driver", "--device cpu"};
  SECTION("no driver") {}
  SECTION("an old driver") {
    options.driver_version = 12040;
    parts = {"device=cuda", "up to 12.4", "newer driver", "--device cpu"};
  }
  SECTION("no GPU") {
    options = emulator::options;
    options.device_count = 0;
    parts = {"device=cuda", "no GPU", "CUDA_VISIBLE_DEVICES", "--device cpu"};
  }
  const emulator::Use use(options);
  check_throws<UsageError>([] { Runtime runtime(Device::cuda); }, parts);
}

/// Forward and backward of blockwise attention with so many channels a head.
void attend(DType dtype, int64_t D) {
  OnDevice gpu(Device::cuda);
  AttentionRun run({1, 1, 1, D, {0, 3}, {0, 3}}, dtype, /*naive=*/false, 1);
  run.backward();
  gpu.runtime.wait();
}

TEST_CASE("heads that a block has no room for are refused before a kernel starts") {
  for (DType dtype : kFloatDTypes) {
    check_throws<UsageError>([&] { attend(dtype, 258); },
                             {"head_dim=258", "at most 256", "--attention naive"});
    attend(dtype, 256);
  }
  emulator::Options options = emulator::options;
  options.shared_bytes = 99 << 10;  // of compute capability 8.6 and 8.9
  const emulator::Use use(options);
  for (const auto& [dtype, most] : {std::pair(DType::f64, 120), std::pair(DType::f32, 252)}) {
    const std::string try_this = fmt::format("try a head_dim of {}, or --attention naive", most);
    check_throws<UsageError>([&, dtype = dtype, most = most] { attend(dtype, most + 2); },
                             {fmt::format("head_dim={}", most + 2), "101376 bytes", try_this});
    attend(dtype, most);
  }
}

TEST_CASE("a call that fails names itself, its place, the rank and CUDA's reason") {
  const auto failing = [] { cuda::check(cudaErrorInvalidValue, "cudaThis()", "there.cpp", 7); };
  check_throws<Error>(failing, {"cudaThis() failed at there.cpp:7: invalid argument"});
  OnDevice gpu(Device::cuda);
  check_throws<Error>(failing, {"cudaThis() failed on rank 0 at there.cpp:7: invalid argument"});
}

TEST_CASE("a cuBLASLt that does not start is named, while a rank is still being made") {
  const std::shared_ptr<Accelerator> device = make_cuda_device(0);
  emulator::Options options = emulator::options;
  options.cublas_starts = false;
  const emulator::Use use(options);
  check_throws<Error>([&] { device->make_backend(); },
                      {"cublasLtCreate(&library_) failed: ", "NOT_INITIALIZED"});
}

TEST_CASE("the records name the GPU, its driver and its library") {
  emulator::Options options = emulator::options;
  options.compute_capability = 86;
  const emulator::Use use(options);
  OnDevice gpu(Device::cuda);
  const Accelerator& accelerator = *gpu.runtime.accelerator();
  REQUIRE(accelerator.description() ==
          fmt::format("emulated device, compute capability 8.6, driver for CUDA {}.{}",
                      CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10));
  REQUIRE(accelerator.matmul_library() ==
          fmt::format("cuBLASLt of CUDA {}.{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10));
}

TEST_CASE("a GPU that the kernels were not compiled for is named") {
  emulator::Options options = emulator::options;
  options.compute_capability = 75;
  const emulator::Use use(options);
  check_throws<UsageError>(
      [] { Runtime runtime(Device::cuda); },
      {"device=cuda", "compute capability 7.5", "CUDA_ARCHITECTURES=75", "--device cpu"});
}

}  // namespace
}  // namespace usp::test
