#include <dlfcn.h>

#include "comm/launch.h"
#include "cuda/loaded/forward.h"
#include "tensor/ops.h"
#include "testing.h"

/// NCCL and cuBLASLt as a program for GPUs has them: libraries that it opens by name when it first
/// calls one of their functions. The emulated ones, built as such libraries.
namespace usp::test {
namespace {

/// A library that is open already, or nullptr.
void* opened(const char* name) { return dlopen(name, RTLD_NOW | RTLD_NOLOAD); }

Tensor row(double a, double b) {
  return Tensor::from_host(std::vector<double>{a, b}, {2}, DType::f64);
}

void expect(const Tensor& found, const Values& expected, const char* what) {
  USP_CHECK(found.items() == expected, "{}: {}", what, found.item(0));
}

TEST_CASE("NCCL is opened by name, and what is given to it arrives there") {
  run_threads(
      2,
      [](const Communicator& world) {
        world.engine().set_device_kind(EngineKind::nccl);
        const int me = world.rank(), other = 1 - me;
        const Tensor x = row(1 + me, 10 * me), y = row(0, 0), one = row(0, 0).narrow(0, 0, 1);
        world.all_reduce(x);
        expect(x, {3, 10}, "all_reduce");
        world.all_reduce(y, ReduceOp::max);
        world.reduce_scatter(one, x);
        expect(one, {me == 0 ? 6. : 20.}, "reduce_scatter");
        world.all_gather(y, one);
        expect(y, {6, 20}, "all_gather");
        const Tensor mine = row(me, me);
        world.broadcast(mine, /*root=*/1);
        expect(mine, {1, 1}, "broadcast");
        const Tensor sent = row(me, 7), got = row(0, 0);
        const SendRecv batch[] = {{SendRecv::send, sent, other}, {SendRecv::recv, got, other}};
        world.send_recv_async(batch).wait();
        expect(got, {double(other), 7}, "send and recv");
        world.all_to_all(got, x);
        expect(got, me == 0 ? Values{3, 3} : Values{10, 10}, "all_to_all");
      },
      60, Device::cuda);
  REQUIRE(opened("libnccl.so.2") != nullptr);
}

TEST_CASE("cuBLASLt is opened by name, and what is given to it arrives there") {
  const auto product = [](Device device, DType dtype) {
    const OnDevice on(device);
    Random random(3);
    const Tensor a = random.tensor({3, 5}, dtype), b = random.tensor({4, 5}, dtype);
    const Tensor c = random.tensor({3, 4}, dtype);
    ops::matmul(c, a, b.transposed(), /*accumulate=*/true);
    return c.items();
  };
  for (DType dtype : kFloatDTypes) {
    check_close(product(Device::cuda, dtype), product(Device::cpu, dtype), tolerance_of(dtype));
  }
  REQUIRE(opened("libcublasLt.so.13") != nullptr);
}

TEST_CASE("a library that the loader does not find is named, and the flag that needs it") {
  check_throws<UsageError>(
      [] { cuda::open_library("libnccl.so.0", "comm=nccl", "--comm mpi"); },
      {"comm=nccl needs libnccl.so.0", "loader", "LD_LIBRARY_PATH=", "or --comm mpi"});
}

TEST_CASE("a function that a library lacks is named") {
  void* library = cuda::open_library("libnccl.so.2", "comm=nccl", "--comm mpi");
  check_throws<Error>([&] { cuda::find_function(library, "ncclNoSuchCall"); },
                      {"ncclNoSuchCall is no function of the library that is here"});
}

}  // namespace
}  // namespace usp::test
