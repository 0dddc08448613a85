#include "tensor/device_group.h"
#include "tensor/ops.h"
#include "testing.h"

/// NCCL's operations in communicators of one rank: all that one GPU can carry out. A chapter with
/// one rank sends nothing, so none of its runs comes here.
namespace usp::test {
namespace {

class Alone {
 public:
  Alone() { library().require(); }

  std::unique_ptr<DeviceGroup> join() { return library().join(library().new_group_id(), 1, 0); }
  std::shared_ptr<SideCopies::Event> start(DeviceGroup& group, const DeviceGroup::Call& call) {
    return start_all({{&group, call}})[0];
  }
  std::vector<std::shared_ptr<SideCopies::Event>> start_all(
      const std::vector<DeviceLibrary::Start>& calls) {
    return library().start(calls);
  }
  SideCopies& copies() { return dynamic_cast<SideCopies&>(*gpu_.runtime.accelerator()); }

 private:
  DeviceLibrary& library() { return dynamic_cast<DeviceLibrary&>(*gpu_.runtime.accelerator()); }

  OnDevice gpu_{Device::cuda};
};

/// The last of a row of kernels makes it.
Tensor made(int64_t count, DType dtype, uint64_t seed) {
  Random random(seed);
  const Tensor x = random.tensor({count}, dtype), sum = Tensor::empty({count}, dtype);
  ops::add(sum, x, x);
  for (int i = 0; i < 3; ++i) ops::add(sum, sum, x);
  return sum;
}

/// A kernel reads it first.
std::vector<char> read_by_kernel(const Tensor& x) {
  const Tensor twice = Tensor::empty(x.shape(), x.dtype());
  ops::add(twice, x, x);
  return bits_of(twice);
}

DeviceGroup::Call call_of(CommKind kind, const Tensor& input, const Tensor& output) {
  DeviceGroup::Call call;
  call.kind = kind;
  call.input = input.address();
  call.output = output.address();
  call.input_count = input.numel();
  call.output_count = output.numel();
  call.dtype = input.dtype();
  call.peer = 0;
  call.input_counts = {input.numel()};
  call.output_counts = {output.numel()};
  return call;
}

constexpr CommKind kCollectives[] = {CommKind::all_reduce, CommKind::reduce_scatter,
                                     CommKind::all_gather, CommKind::all_to_all};

TEST_CASE("a communicator of one rank gives back what it was given, in every operation") {
  Alone alone;
  const std::unique_ptr<DeviceGroup> group = alone.join();
  for (DType dtype : kFloatDTypes) {
    for (int64_t count : {1, 70001}) {
      for (CommKind kind : kCollectives) {
        for (bool maximum : {false, true}) {
          CAPTURE(name(dtype), count, name(kind), maximum);
          const Tensor x = made(count, dtype, 1), y = Tensor::empty({count}, dtype);
          ops::fill(y, kNaN);
          DeviceGroup::Call call = call_of(kind, x, y);
          call.maximum = maximum;
          const std::shared_ptr<SideCopies::Event> over = alone.start(*group, call);
          alone.copies().hold_work_until(*over);
          REQUIRE(read_by_kernel(y) == read_by_kernel(x));
        }
      }
      CAPTURE(name(dtype), count);
      const Tensor x = made(count, dtype, 2), expected = clone(x);
      alone.copies().hold_work_until(*alone.start(*group, call_of(CommKind::broadcast, x, x)));
      REQUIRE(read_by_kernel(x) == read_by_kernel(expected));
    }
  }
  REQUIRE(group->error().empty());
}

TEST_CASE("two communicators of one rank take turns, as the parts of a split do") {
  Alone alone;
  const std::unique_ptr<DeviceGroup> whole = alone.join(), part = alone.join();
  for (int i = 0; i < 3; ++i) {
    const Tensor x = made(3000, DType::f32, 3), y = made(3000, DType::f32, 4);
    const Tensor sum_x = Tensor::empty({3000}, DType::f32), sum_y = clone(sum_x);
    const auto first = alone.start(*whole, call_of(CommKind::all_reduce, x, sum_x));
    const auto second = alone.start(*part, call_of(CommKind::all_reduce, y, sum_y));
    alone.copies().hold_work_until(*second);
    REQUIRE(read_by_kernel(sum_y) == read_by_kernel(y));
    alone.copies().hold_work_until(*first);
    REQUIRE(read_by_kernel(sum_x) == read_by_kernel(x));
  }
}

TEST_CASE("a communicator that was given up starts nothing more, and another one does") {
  Alone alone;
  const std::unique_ptr<DeviceGroup> group = alone.join();
  const Tensor x = made(70001, DType::f32, 5), y = Tensor::zeros({70001}, DType::f32);
  alone.copies().hold_work_until(*alone.start(*group, call_of(CommKind::all_reduce, x, y)));
  REQUIRE(read_by_kernel(y) == read_by_kernel(x));
  group->abort();
  group->abort();  // as every rank of a run may, that has failed
  REQUIRE(group->error().empty());
  check_throws<Error>([&] { alone.start(*group, call_of(CommKind::all_reduce, x, y)); },
                      {"given up"});
  const std::unique_ptr<DeviceGroup> next = alone.join();
  ops::fill(y, kNaN);
  alone.copies().hold_work_until(*alone.start(*next, call_of(CommKind::all_reduce, x, y)));
  REQUIRE(read_by_kernel(y) == read_by_kernel(x));
}

TEST_CASE("a rank's message to itself arrives, where both of its ends are in one group of calls") {
  Alone alone;
  const std::unique_ptr<DeviceGroup> group = alone.join();
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const Tensor x = made(70001, dtype, 6), y = Tensor::empty({70001}, dtype);
    ops::fill(y, kNaN);
    const auto over = alone.start_all({{group.get(), call_of(CommKind::send, x, {})},
                                       {group.get(), call_of(CommKind::recv, y, y)}});
    for (const auto& event : over) alone.copies().hold_work_until(*event);
    REQUIRE(read_by_kernel(y) == read_by_kernel(x));
  }
  group->leave();
}

}  // namespace
}  // namespace usp::test
