#include "train/parameter.h"

#include "base/rng.h"
#include "testing.h"

namespace usp::test {
namespace {

TEST_CASE("element i of a weight is std * normal(seed, name, i), rounded once") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    ParameterList list;
    Parameter& weight = list.add("layer.weight", {37, 11}, 0.02);
    list.allocate(dtype, /*seed=*/5);
    const RandomStream stream(5, "layer.weight");
    Values expected;
    for (int64_t i = 0; i < 37 * 11; ++i) expected.push_back(0.02 * stream.normal(i));
    REQUIRE(same_bits(weight.value, Tensor::from_host(expected, {37, 11}, dtype)));
    REQUIRE(same_bits(weight.shard.master,
                      Tensor::from_host(expected, {37 * 11}, accumulate_dtype(dtype))));
  }
}

TEST_CASE("a weight of more than a million elements follows the same rule to its end") {
  const OnDevice cpu;
  ParameterList list;
  const int64_t numel = (int64_t{1} << 20) + 3;
  Parameter& weight = list.add("w", {numel}, 1);
  list.allocate(DType::f64, 9);
  const RandomStream stream(9, "w");
  for (int64_t i : {int64_t{0}, numel / 2, numel - 4, numel - 3, numel - 1}) {
    REQUIRE(weight.value.item(i) == stream.normal(i));
  }
}

TEST_CASE("a standard deviation of 0 stands for a norm: all ones") {
  const OnDevice cpu;
  ParameterList list;
  Parameter& norm = list.add("norm.weight", {6}, 0, {{0, 2, 3}});
  list.allocate(DType::bf16, 1);
  REQUIRE(norm.value.items() == Values(3, 1.0));
  REQUIRE(norm.shard.master.items() == Values(3, 1.0));
}

TEST_CASE("any slice of a weight, on any axes, equals the slice of the whole") {
  const OnDevice cpu;
  Random random(1);
  for (int trial = 0; trial < 40; ++trial) {
    const DType dtype = kFloatDTypes[trial % 3];
    const Shape shape{random.integer(1, 9), random.integer(1, 9), random.integer(1, 9)};
    std::vector<Slice> slices;
    for (int axis = 0; axis < 3; ++axis) {
      if (random.integer(0, 2) == 0) continue;
      const int64_t offset = random.integer(0, shape[axis]);
      slices.push_back({axis, offset, random.integer(0, shape[axis] - offset)});
    }
    ParameterList whole_list, part_list;
    Parameter& whole = whole_list.add("w", shape, 0.3);
    part_list.add("other", {4}, 1);
    Parameter& part = part_list.add("w", shape, 0.3, slices);
    whole_list.allocate(dtype, 2);
    part_list.allocate(dtype, 2);
    Tensor expected = whole.value, master = whole.shard.master.view(shape);
    for (const Slice& slice : slices) {
      expected = expected.narrow(slice.axis, slice.offset, slice.length);
      master = master.narrow(slice.axis, slice.offset, slice.length);
    }
    REQUIRE(part.local_shape() == expected.shape());
    REQUIRE(same_bits(part.value, expected));
    REQUIRE(same_bits(part.shard.master, clone(master).view({master.numel()})));
  }
}

TEST_CASE("initial values can be drawn from any element on") {
  ParameterList list;
  Parameter& weight = list.add("w", {10, 8}, 0.5, {{1, 3, 4}});
  Values all(40), tail(13);
  initial_values(weight, 4, 0, all);
  initial_values(weight, 4, 27, tail);
  REQUIRE(tail == Values(all.begin() + 27, all.end()));
}

TEST_CASE("parameters lie side by side in three flat tensors, in the order of their addition") {
  OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const DType acc = accumulate_dtype(dtype);
    ParameterList list;
    for (int i = 0; i < 4; ++i) {
      list.add(fmt::format("w{}", i), {i + 1, 7}, 1,
               i == 2 ? std::vector<Slice>{{0, 1, 2}} : std::vector<Slice>{});
      REQUIRE(list[i].index == i);
    }
    list.allocate(dtype, 1);
    REQUIRE(list.size() == 4);
    REQUIRE(list.numel() == (1 + 2 + 2 + 4) * 7);
    int64_t offset = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const Parameter& parameter = list[i];
      const int64_t numel = parameter.local_shape().numel();
      const auto begins_there = [&](const Tensor& tensor, const Shape& shape, const Tensor& flat) {
        return tensor.shape() == shape && tensor.contiguous() &&
               tensor.address() == flat.narrow(0, offset, numel).address();
      };
      REQUIRE(begins_there(parameter.value, parameter.local_shape(), list.flat_values()));
      REQUIRE(begins_there(parameter.grad, parameter.local_shape(), list.flat_grads()));
      REQUIRE(parameter.shard.begin == 0);
      REQUIRE(parameter.shard.end == numel);
      REQUIRE(begins_there(parameter.shard.value, {numel}, list.flat_values()));
      REQUIRE(begins_there(parameter.shard.master, {numel}, list.flat_masters()));
      REQUIRE(begins_there(parameter.shard.grad, {numel}, list.flat_grads()));
      offset += numel;
    }
    REQUIRE(offset == list.flat_grads().numel());
    const Tensor stacked[] = {list[1].value, list[2].value, list[3].value};
    REQUIRE(adjacent(stacked).shape() == Shape{8, 7});

    REQUIRE(list.flat_values().dtype() == dtype);
    REQUIRE(list.flat_masters().dtype() == acc);
    REQUIRE(list.flat_grads().dtype() == acc);
    const bool shared = list.flat_values().address() == list.flat_masters().address();
    REQUIRE(shared == (dtype != DType::bf16));
    const Allocator& allocator = cpu.allocator();
    REQUIRE(allocator.live_bytes(Category::weights) == list.numel() * bytes_of(dtype));
    REQUIRE(allocator.live_bytes(Category::gradients) == list.numel() * bytes_of(acc));
    REQUIRE(allocator.live_bytes(Category::optimizer) ==
            (shared ? 0 : list.numel() * bytes_of(acc)));
  }
}

TEST_CASE("a parameter list refuses a second parameter of a name, a bad slice and a missing name") {
  ParameterList list;
  Parameter& weight = list.add("a", {4, 6}, 1);
  REQUIRE(&list.find("a") == &weight);
  check_throws<Error>([&] { list.find("b"); }, {"no parameter b"});
  check_throws<Error>([&] { list.add("a", {2}, 1); }, {"a is added twice"});
  check_throws<Error>([&] { list.add("c", {4, 6}, 1, {{0, 2, 3}}); }, {"c", "axis 0", "[4, 6]"});
  check_throws<Error>([&] { list.add("d", {4, 6}, 1, {{2, 0, 1}}); }, {"d", "axis 2"});
  check_throws<Error>([&] { list.add("e", {4, 6}, 1, {{1, -1, 1}}); }, {"e", "axis 1"});
}

TEST_CASE("parameters whose gradients other ranks sum lie apart, each kind together") {
  const OnDevice cpu;
  ParameterList list;
  for (const char* name : {"a", "expert.0", "b", "expert.1", "c"}) {
    Parameter& parameter = list.add(name, {3}, 1);
    if (name[0] == 'e') parameter.grad_groups = {"edp"};
  }
  list.find("b").grad_groups.push_back("tp");
  list.allocate(DType::f64, 1);
  std::vector<int64_t> begins;
  for (size_t i = 0; i < list.size(); ++i) {
    begins.push_back(list[i].flat_begin);
    REQUIRE(list[i].grad.address() == list.flat_grads().narrow(0, begins[i], 3).address());
  }
  REQUIRE(begins == std::vector<int64_t>{0, 9, 3, 12, 6});
}

}  // namespace
}  // namespace usp::test
