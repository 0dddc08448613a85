#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <numeric>

#include "common/attention_case.h"
#include "cuda/errors.h"
#include "cuda/launch.h"
#include "emulator/emulator.h"
#include "tensor/expert_ops.h"
#include "tensor/launches.h"
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

TEST_CASE("kernels and products that the host launches are counted") {
  OnDevice gpu(Device::cuda);
  const Tensor x = Tensor::from_host(numbers(36), {6, 6}, DType::f32);
  const Tensor y = Tensor::empty({6, 6}, DType::f32), sum = Tensor::zeros({1}, DType::f64);
  const auto counted = [&](const std::function<void()>& call) {
    const int64_t before = launches;
    call();
    return launches - before;
  };
  REQUIRE(counted([&] { ops::add(y, x, x); }) == 1);
  REQUIRE(counted([&] { ops::matmul(y, x, x); }) == 1);
  REQUIRE(counted([&] { ops::sum_squares(sum, x); }) == 2);
  REQUIRE(counted([&] { ops::add(y.narrow(0, 0, 0), x.narrow(0, 0, 0), x.narrow(0, 0, 0)); }) == 0);
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

/// The first of a program, which shows whether the GPU has kernels.
void run_a_kernel() {
  const OnDevice gpu(Device::cuda);
  ops::fill(Tensor::empty({3}, DType::f32), 1);
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
  SECTION("one that another process has for itself") {
    options = emulator::options;
    options.device_busy = true;
    parts = {"device=cuda", "another process has this GPU", "--device cpu"};
  }
  SECTION("one that is newer than the kernels, under an old driver") {
    options = emulator::options;
    options.ptx_too_new = true;
    parts = {"device=cuda", "newer than the kernels", "try a newer driver"};
  }
  const emulator::Use use(options);
  check_throws<UsageError>(run_a_kernel, parts);
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

__global__ void do_nothing() {}

TEST_CASE("a launch that fails names the kernel, its grid and the line that has started it") {
  OnDevice gpu(Device::cuda);
  const auto start = [](int64_t blocks, int threads) {
    cuda::launch(do_nothing, blocks, threads, 0, nullptr);
  };
  const std::string place = "test_device.cpp:";
  check_throws<Error>([&] { start(3, 2000); },
                      {"do_nothing", "3 blocks of 2000 threads", place, "invalid configuration"});
  // 2^32 + 1 is 1 in the 32 bits that a grid has.
  check_throws<Error>([&] { start((int64_t{1} << 32) + 1, 32); },
                      {"do_nothing", "4294967297 blocks", place, "at most 2147483647"});
  check_throws<Error>([] { cuda::check(cudaErrorIllegalAddress, "cudaThis()", "there.cpp", 7); },
                      {"an illegal memory access", "CUDA_LAUNCH_BLOCKING=1 shows which"});
}

/// c += a b for operands in the middle of larger ones, held against the CPU.
void check_product(DType dtype, DType c_dtype, int64_t m, int64_t k, int64_t n, bool accumulate) {
  Random random(7);
  const auto part = [&](int64_t rows, int64_t columns, DType type) {
    return random.tensor({rows + 1, columns + 3}, type).narrow(0, 1, rows).narrow(1, 1, columns);
  };
  const Tensor a = part(m, k, dtype), b = part(k, n, dtype), c = part(m, n, c_dtype);
  const Values left = a.items(), right = b.items();
  Values expected = c.items();
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = accumulate ? expected[i * n + j] : 0;
      for (int64_t l = 0; l < k; ++l) sum += left[i * k + l] * right[l * n + j];
      expected[i * n + j] = sum;
    }
  }
  ops::matmul(c, a, b, accumulate);
  check_close(c, expected, tolerance_of(c_dtype), "product");
}

TEST_CASE("products that cuBLASLt has no kernel for are computed all the same, and counted") {
  emulator::Options options = emulator::options;
  const bool has_none = GENERATE(false, true);
  options.cublas_lacks = [](const emulator::MatmulAsked& asked) { return asked.alignment < 16; };
  if (has_none) options.cublas_lacks = [](const emulator::MatmulAsked&) { return true; };
  const emulator::Use use(options);
  OnDevice gpu(Device::cuda);
  REQUIRE(gpu.runtime.accelerator()->remarks().empty());
  for (const auto& [dtype, c_dtype] : {std::pair(DType::f64, DType::f64),
                                       {DType::f32, DType::f32},
                                       {DType::bf16, DType::bf16},
                                       {DType::bf16, DType::f32}}) {
    for (bool accumulate : {false, true}) {
      CAPTURE(has_none, name(dtype), name(c_dtype), accumulate);
      check_product(dtype, c_dtype, 1, 5, 7, accumulate);
      check_product(dtype, c_dtype, 19, 33, 17, accumulate);
    }
  }
  const std::vector<std::string> remarks = gpu.runtime.accelerator()->remarks();
  REQUIRE(remarks.size() == 1);
  CAPTURE(remarks[0]);
  REQUIRE(remarks[0].find(has_none ? "16 by a kernel of our own" : "16 by aligned copies") !=
          std::string::npos);
}

TEST_CASE("products of more shapes than cuBLASLt's plans are kept of are right, in any order") {
  OnDevice gpu(Device::cuda);
  constexpr int64_t kMost = 1030;
  const Tensor ones = Tensor::empty({1, kMost}, DType::f32),
               sum = Tensor::zeros({1, 1}, DType::f32);
  ops::fill(ones, 1);
  const auto multiply = [&](int64_t k) {
    ops::matmul(sum, ones.narrow(1, 0, k), ones.narrow(1, 0, k).transposed());
    return sum.item();
  };
  for (int64_t k = 1; k <= kMost; ++k) REQUIRE(multiply(k) == double(k));
  for (int64_t k : {1, 2, 1029}) REQUIRE(multiply(k) == double(k));
}

int asked_for = 0;

TEST_CASE("experts' products ask for few choices, whatever tokens choose") {
  emulator::Options options = emulator::options;
  options.cublas_lacks = [](const emulator::MatmulAsked&) { return ++asked_for < 0; };
  const emulator::Use use(options);
  OnDevice gpu(Device::cuda);
  asked_for = 0;
  constexpr int64_t kExperts = 4, kWidth = 8;
  const Tensor weights = Tensor::zeros({kExperts, kWidth, kWidth}, DType::f32);
  Random random(5);
  for (int step = 0; step < 60; ++step) {
    std::vector<int64_t> counts;
    for (int64_t expert = 1; expert < kExperts; ++expert) {
      counts.push_back(random.integer(200, 400));
    }
    counts.push_back(64);  // behind the last expert there are no rows to fill its shape
    const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const Tensor x = Tensor::zeros({rows, kWidth}, DType::f32),
                 y = Tensor::empty(x.shape(), x.dtype());
    ops::grouped_linear_forward(y, x, weights, counts);
    gpu.runtime.wait();
  }
  // From 200 to 256 rows each fourth, from there to 400 each eighth, and 64.
  REQUIRE(asked_for <= 15 + 18 + 1);
}

TEST_CASE("products of bf16 are summed in f32, however deep they are") {
  OnDevice gpu(Device::cuda);
  Values left(128), right(128, 1.0);
  left[0] = 256;
  left[1] = left[100] = 1;  // each lost in a sum that is rounded to bf16: 258 is the next number
  const Tensor a = Tensor::from_host(left, {1, 128}, DType::bf16);
  const Tensor b = Tensor::from_host(right, {128, 1}, DType::bf16);
  const Tensor c = Tensor::zeros({1, 1}, DType::bf16);
  ops::matmul(c, a, b);
  REQUIRE(c.item() == 258);
}

TEST_CASE("a cuBLASLt that does not start is named, while a rank is still being made") {
  const std::shared_ptr<Accelerator> device = make_cuda_device(0);
  emulator::Options options = emulator::options;
  options.cublas_starts = false;
  const emulator::Use use(options);
  check_throws<Error>([&] { device->make_backend(); },
                      {"cublasLtCreate(&library_) failed: ", "NOT_INITIALIZED"});
}

TEST_CASE("rows that no access of 16 bytes moves are named once, if they are long") {
  OnDevice gpu(Device::cuda);
  const auto add = [](int64_t numel, DType dtype) {
    const Tensor x = Tensor::zeros({numel}, dtype);
    ops::add(x, x, x);
  };
  add(33, DType::f32);
  add(4096, DType::bf16);
  add(1004, DType::f32);  // no multiple of 8, but of 4
  REQUIRE(gpu.runtime.accelerator()->remarks().empty());
  for (int i = 0; i < 2; ++i) add(1004, DType::bf16);
  add(32003, DType::f32);
  const std::vector<std::string> remarks = gpu.runtime.accelerator()->remarks();
  REQUIRE(remarks.size() == 1);
  CAPTURE(remarks[0]);
  REQUIRE(remarks[0].starts_with("Rows of 1004, 32003 elements are "));
  for (int64_t numel = 1001; numel < 1012; ++numel) add(numel, DType::bf16);
  REQUIRE(gpu.runtime.accelerator()->remarks()[0].find("elements, and perhaps others, are ") !=
          std::string::npos);
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
  REQUIRE(accelerator.matmul_library() == "cuBLASLt 13.0.2");
}

TEST_CASE("a GPU that the kernels were not compiled for is named") {
  emulator::Options options = emulator::options;
  options.compute_capability = 75;
  options.kernels_need_capability = 80;
  const emulator::Use use(options);
  check_throws<UsageError>(run_a_kernel, {"device=cuda", "compute capability 7.5",
                                          "CUDA_ARCHITECTURES=75", "--device cpu"});
}

TEST_CASE("a GPU before compute capability 8.0 computes in f32 and f64, and refuses bf16") {
  emulator::Options options = emulator::options;
  for (int capability : {75, 80, 90, 120}) {
    CAPTURE(capability);
    options.compute_capability = capability;
    const emulator::Use use(options);
    const OnDevice gpu(Device::cuda);
    const Accelerator& accelerator = *gpu.runtime.accelerator();
    accelerator.require(DType::f32);
    accelerator.require(DType::f64);
    if (capability >= 80) {
      accelerator.require(DType::bf16);
      continue;
    }
    check_throws<UsageError>([&] { accelerator.require(DType::bf16); },
                             {"dtype=bf16", "capability 7.5", "try --dtype f32"});
  }
}

}  // namespace
}  // namespace usp::test
