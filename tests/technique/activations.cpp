#include "technique/window.h"

/// What backward needs belongs to the micro-batch, not to the layer: several may be in flight, and
/// running forward again recomputes it.
namespace usp::test {
namespace {

struct TwoMicroBatches {
  explicit TwoMicroBatches(DType dtype, bool naive)
      : model(allocated_model(tiny_model(), kSeqLen, dtype, probabilities_of(naive), 1)),
        grads(model.parameters()) {
    randomize(model.parameters(), 2);
    Random random(3);
    loss = Tensor::zeros({1}, DType::f64);
    a = random_pass(random, tiny_model(), 2, kSeqLen, 1.0 / 30, loss);
    b = random_pass(random, tiny_model(), 3, kSeqLen, 1.0 / 30, loss);
  }

  /// Loss and flat gradients of one window that runs `body`.
  std::vector<Tensor> window(const std::function<void()>& body) {
    ops::fill(loss, 0);
    ops::fill(model.parameters().flat_grads(), kNaN);
    grads.begin_window(2);
    body();
    grads.end_window();
    return {clone(loss), clone(model.parameters().flat_grads())};
  }
  std::vector<Tensor> one_after_the_other() {
    return window([&] {
      model.backward(model.forward(a), grads, a);
      model.backward(model.forward(b), grads, b);
    });
  }

  Model model;
  Grads grads;
  Tensor loss;
  Pass a, b;
};

TEST_CASE("two micro-batches in flight give the bits of one after the other") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    for (bool naive : {true, false}) {
      CAPTURE(name(dtype), naive);
      TwoMicroBatches both(dtype, naive);
      const auto expected = both.one_after_the_other();
      const auto actual = both.window([&] {
        Model::Activations of_a = both.model.forward(both.a);
        Model::Activations of_b = both.model.forward(both.b);
        both.model.backward(std::move(of_a), both.grads, both.a);
        both.model.backward(std::move(of_b), both.grads, both.b);
      });
      REQUIRE(same_bits(actual[0], expected[0]));
      REQUIRE(same_bits(actual[1], expected[1]));
    }
  }
}

TEST_CASE("weight gradients that wait for others to go back first keep their bits") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    for (bool naive : {true, false}) {
      CAPTURE(name(dtype), naive);
      TwoMicroBatches both(dtype, naive);
      const auto expected = both.one_after_the_other();
      const auto actual = both.window([&] {
        Grads::Deferred of_a, of_b;
        both.grads.defer_to(&of_a);
        both.model.backward(both.model.forward(both.a), both.grads, both.a);
        both.grads.defer_to(&of_b);
        both.model.backward(both.model.forward(both.b), both.grads, both.b);
        both.grads.defer_to(nullptr);
        both.grads.run(of_a);
        both.grads.run(of_b);
      });
      REQUIRE(same_bits(actual[0], expected[0]));
      REQUIRE(same_bits(actual[1], expected[1]));
    }
  }
}

TEST_CASE("gradients do not depend on which micro-batch goes back first, up to rounding") {
  const OnDevice cpu;
  TwoMicroBatches both(DType::f64, false);
  const auto expected = both.one_after_the_other();
  const auto actual = both.window([&] {
    Model::Activations of_a = both.model.forward(both.a);
    Model::Activations of_b = both.model.forward(both.b);
    both.model.backward(std::move(of_b), both.grads, both.b);
    both.model.backward(std::move(of_a), both.grads, both.a);
  });
  check_close(actual[1], expected[1], 1e-13);
}

TEST_CASE("a second forward pass recomputes the first one's activations bit for bit") {
  const OnDevice cpu;
  for (bool naive : {true, false}) {
    CAPTURE(naive);
    TwoMicroBatches both(DType::f32, naive);
    const auto expected = both.one_after_the_other();
    const auto actual = both.window([&] {
      both.model.forward(both.a);  // dropped, as recomputation does
      both.model.forward(both.b);
      ops::fill(both.loss, 0);
      both.model.backward(both.model.forward(both.a), both.grads, both.a);
      both.model.backward(both.model.forward(both.b), both.grads, both.b);
    });
    REQUIRE(same_bits(actual[0], expected[0]));
    REQUIRE(same_bits(actual[1], expected[1]));
  }
}

TEST_CASE("activations are gone once backward has run, and while it runs they shrink") {
  OnDevice cpu;
  TwoMicroBatches both(DType::f32, false);
  Allocator& allocator = cpu.allocator();
  const int64_t before = allocator.live_bytes(Category::activations);
  both.grads.begin_window(1);
  Model::Activations activations = both.model.forward(both.a);
  const int64_t kept = allocator.live_bytes(Category::activations) - before;
  REQUIRE(kept > 0);
  std::vector<int64_t> live;
  both.grads.on_ready([&](Parameter& parameter) {
    if (parameter.name.ends_with("input_layernorm.weight")) {
      live.push_back(allocator.live_bytes(Category::activations) - before);
    }
  });
  both.model.backward(std::move(activations), both.grads, both.a);
  REQUIRE(allocator.live_bytes(Category::activations) == before);
  REQUIRE(live.size() == 2);  // layers 1 and 0, in this order
  REQUIRE(live[0] < kept);
  REQUIRE(live[1] < live[0]);
}

TEST_CASE("backward without forward is an error") {
  const OnDevice cpu;
  TwoMicroBatches both(DType::f64, false);
  both.grads.begin_window(1);
  Model::Activations empty = both.model.forward(both.a);
  empty = Model::Activations(empty.size());
  check_throws<Error>([&] { both.model.backward(std::move(empty), both.grads, both.a); },
                      {"nothing saved"});
}

}  // namespace
}  // namespace usp::test
