#include "train/grads.h"

#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

/// Three parameters of two elements; two layers read the second.
struct Fixture {
  Fixture() : grads(list) {
    for (const char* name : {"first", "tied", "last"}) list.add(name, {2}, 1).uses = 1;
    list.find("tied").uses = 2;
    list.allocate(DType::f64, 1);
    ops::fill(list.flat_grads(), kNaN);  // what an earlier window left behind
    grads.on_ready([this](Parameter& parameter) { ready.push_back(parameter.name); });
  }

  /// Hands over a contribution of `value` to one parameter.
  void contribute(int index, double value) {
    Parameter* parameter = &list[index];
    grads.add({parameter}, [=](bool accumulate) {
      const Tensor term = Tensor::from_host(Values(2, value), {2}, DType::f64);
      if (accumulate) {
        ops::add(parameter->grad, parameter->grad, term);
      } else {
        ops::copy(parameter->grad, term);
      }
    });
  }

  OnDevice cpu;
  ParameterList list;
  Grads grads;
  std::vector<std::string> ready;
};

using Names = std::vector<std::string>;

TEST_CASE("the first contribution of a window overwrites, every later one adds") {
  Fixture f;
  for (int window = 0; window < 2; ++window) {
    f.grads.begin_window(/*micro_batches=*/2);
    for (double value : {1.0, 10.0}) {
      f.contribute(2, value);
      f.contribute(1, value);
      f.contribute(1, 100 * value);
      f.contribute(0, value);
    }
    f.grads.end_window();
    REQUIRE(f.list.flat_grads().items() == Values{11, 11, 1111, 1111, 11, 11});
  }
}

TEST_CASE("a parameter is ready once, at its last contribution, in whatever order they come") {
  Fixture f;
  f.grads.begin_window(2);
  f.contribute(1, 1);  // the tied parameter expects two from each micro-batch
  f.contribute(0, 1);
  f.contribute(1, 1);
  f.contribute(1, 1);
  REQUIRE(f.ready.empty());
  f.contribute(0, 1);
  REQUIRE(f.ready == Names{"first"});
  f.contribute(2, 1);
  f.contribute(2, 1);
  REQUIRE(f.ready == Names{"first", "last"});
  f.contribute(1, 1);
  REQUIRE(f.ready == Names{"first", "last", "tied"});
  f.grads.end_window();
}

TEST_CASE("a gradient is final when its parameter becomes ready") {
  Fixture f;
  std::vector<Values> seen;
  f.grads.on_ready([&](Parameter& parameter) { seen.push_back(parameter.grad.items()); });
  f.grads.begin_window(1);
  f.contribute(1, 3);
  f.contribute(1, 4);
  f.contribute(0, 5);
  REQUIRE(seen == std::vector<Values>{{7, 7}, {5, 5}});
}

TEST_CASE("all observers see a parameter, in the order in which they were added") {
  Fixture f;
  Names seen;
  for (const char* name : {"a", "b"}) {
    f.grads.on_first([&, name](Parameter& parameter) { seen.push_back(name + parameter.name); });
    f.grads.on_ready([&, name](Parameter& parameter) { seen.push_back(parameter.name + name); });
  }
  f.grads.begin_window(1);
  f.contribute(0, 1);
  REQUIRE(seen == Names{"afirst", "bfirst", "firsta", "firstb"});
  REQUIRE(f.ready == Names{"first"});  // the fixture observes too
}

TEST_CASE("one matmul may contribute to several parameters at once") {
  Fixture f;
  f.grads.begin_window(2);
  const std::vector<Parameter*> both = {&f.list[0], &f.list[2]};
  int calls = 0;
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    f.grads.add(both, [&](bool accumulate) {
      ++calls;
      REQUIRE(accumulate == (micro_batch > 0));
    });
  }
  REQUIRE(calls == 2);
  REQUIRE(f.ready == Names{"first", "last"});
}

TEST_CASE("in a window of several rounds a parameter is ready after each, and begins anew") {
  Fixture f;
  std::vector<Values> seen;
  f.grads.on_ready([&](Parameter& parameter) {
    if (parameter.name == "tied") seen.push_back(parameter.grad.items());
  });
  f.grads.begin_window(/*micro_batches=*/1, /*rounds=*/3);
  for (double value : {1.0, 10.0, 100.0}) {
    f.contribute(1, value);
    f.contribute(1, 2 * value);
  }
  REQUIRE(seen == std::vector<Values>{{3, 3}, {30, 30}, {300, 300}});
  check_throws<Error>([&] { f.contribute(1, 1); }, {"tied", "more than the 6"});
  f.contribute(0, 1);
  check_throws<Error>([&] { f.grads.end_window(); }, {"first got 1 of 3"});
}

TEST_CASE("contributions that are held back count when they are computed, in whatever order") {
  Fixture f;
  std::vector<std::string> first;
  f.grads.on_first([&](Parameter& parameter) { first.push_back(parameter.name); });
  f.grads.begin_window(2);
  Grads::Deferred of_0, of_1;
  f.grads.defer_to(&of_0);
  f.contribute(0, 1);
  f.contribute(1, 2);
  f.contribute(1, 3);
  f.grads.defer_to(&of_1);
  f.contribute(0, 10);
  f.contribute(1, 20);
  f.grads.defer_to(nullptr);
  f.contribute(2, 1000);
  REQUIRE(first == Names{"last"});
  f.grads.run(of_1);
  REQUIRE(first == Names{"last", "first", "tied"});
  REQUIRE(of_1.empty());
  f.contribute(1, 30);
  REQUIRE(f.ready.empty());
  check_throws<Error>([&] { f.grads.end_window(); }, {"first got 1 of 2"});
  f.grads.run(of_0);
  f.contribute(2, 1000);
  f.grads.end_window();
  REQUIRE(f.ready == Names{"first", "tied", "last"});
  REQUIRE(f.list.flat_grads().items() == Values{11, 11, 55, 55, 2000, 2000});
}

TEST_CASE("what a held-back contribution owns is let go of as soon as it is computed") {
  Fixture f;
  f.grads.begin_window(1);
  const auto owned = std::make_shared<int>(1);
  Grads::Deferred deferred;
  f.grads.defer_to(&deferred);
  f.grads.add({&f.list[0]}, [owned](bool) {});
  f.grads.add({&f.list[2]}, [&](bool) { REQUIRE(owned.use_count() == 1); });
  REQUIRE(owned.use_count() == 2);
  f.grads.run(deferred);
}

TEST_CASE("parameters that share a matmul must have had the same number of contributions") {
  Fixture f;
  f.grads.begin_window(2);
  f.contribute(0, 1);
  const std::vector<Parameter*> both = {&f.list[0], &f.list[2]};
  check_throws<Error>([&] { f.grads.add(both, [](bool) {}); }, {"first and last"});
}

TEST_CASE("a missing contribution is an error that names the parameter and both numbers") {
  Fixture f;
  f.grads.begin_window(1);
  f.contribute(0, 1);
  f.contribute(1, 1);
  f.contribute(2, 1);
  check_throws<Error>([&] { f.grads.end_window(); }, {"tied got 1 of 2"});
}

TEST_CASE("a surplus contribution is an error that names the parameter, and computes nothing") {
  Fixture f;
  f.grads.begin_window(1);
  f.contribute(2, 1);
  check_throws<Error>([&] { f.contribute(2, 5); }, {"last", "more than the 1"});
  REQUIRE(f.list[2].grad.items() == Values{1, 1});
}

}  // namespace
}  // namespace usp::test
