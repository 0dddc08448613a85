#include "tensor/device.h"

#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("a program without CUDA refuses that device and says what to do") {
  check_throws<UsageError>([] { Runtime runtime(Device::cuda); },
                           {"device=cuda", "built without CUDA", "--device cpu"});
}

TEST_CASE("devices have the names that the flag has") {
  REQUIRE(name(Device::cpu) == "cpu");
  REQUIRE(name(Device::cuda) == "cuda");
  REQUIRE(name(Device::meta) == "meta");
}

TEST_CASE("an op takes no operand that lies on another device than the runtime's") {
  OnDevice cpu(Device::cpu);
  const Tensor here = Tensor::zeros({2}, DType::f32);
  Runtime other(Device::meta);
  const auto there = [&] {
    const Runtime::Use use(other);
    return Tensor::zeros({2}, DType::f32);
  }();
  check_throws<Error>([&] { ops::add(here, here, there); }, {"add", "meta", "cpu"});
  check_throws<Error>([&] { ops::add(there, here, here); }, {"add", "meta", "cpu"});
  const Runtime::Use use(other);
  check_throws<Error>([&] { ops::add(there, there, here); }, {"add", "cpu", "meta"});
}

TEST_CASE("on the CPU memory of the host is the device's") {
  OnDevice cpu(Device::cpu);
  REQUIRE(cpu.runtime.accelerator() == nullptr);
  const HostScope on_host;
  const Tensor tensor = Tensor::zeros({3}, DType::f64);
  REQUIRE(cpu.allocator().live_bytes() == 24);
  REQUIRE(tensor.to_host().address() == tensor.address());
}

TEST_CASE("elements go into a tensor as they lie in memory, whatever its strides") {
  OnDevice device;
  const std::vector<int32_t> values = {1, 2, 3, 4, 5, 6};
  Tensor whole = Tensor::zeros({3, 4}, DType::i32);
  whole.narrow(1, 1, 2).assign_bytes(std::as_bytes(std::span(values)));
  REQUIRE(whole.items() == Values{0, 1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0});
  whole.view({12}).narrow(0, 3, 6).assign_bytes(std::as_bytes(std::span(values)));
  REQUIRE(whole.items() == Values{0, 1, 2, 1, 2, 3, 4, 5, 6, 5, 6, 0});
  check_throws<Error>([&] { whole.assign_bytes(std::as_bytes(std::span(values))); },
                      {"24 bytes", "[3, 4]", "i32"});
}

}  // namespace
}  // namespace usp::test
