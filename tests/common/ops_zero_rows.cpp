#include "attention_case.h"
#include "tensor/fused_ops.h"

/// A rank may hold no row of a batch, no sample or no parameter: every operation accepts that.
namespace usp::test {
namespace {

TEST_CASE("row operations accept zero rows") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    const DType acc = accumulate_dtype(dtype);
    const auto none = [&](int64_t columns) { return Tensor::empty({0, columns}, dtype); };
    const Tensor rows = Tensor::empty({0}, acc), weight = Tensor::zeros({6}, dtype);
    ops::fill(none(6), 1);
    ops::copy(none(6), none(6));
    ops::copy(none(6), Tensor::empty({4, 6}, DType::f64).narrow(0, 2, 0));
    ops::add(none(6), none(6), none(6));
    ops::swiglu_forward(none(6), none(12));
    ops::swiglu_backward(none(12), none(6), none(12));
    ops::rmsnorm_forward(none(6), rows, none(6), weight, 1e-5);
    ops::rmsnorm_backward_input(none(6), none(6), none(6), weight, rows, {});
    ops::rmsnorm_backward_input(none(6), none(6), none(6), weight, rows, none(6));
    const Tensor table = Tensor::empty({3, 2}, acc);
    for (int64_t samples : {0, 2}) {
      ops::rope(Tensor::empty({samples, 0, 3, 4}, dtype), table, table, Positions(), false);
    }
    ops::rope(Tensor::empty({0, 3, 3, 4}, dtype), table, table, Positions(0, 3), true);
    const Tensor loss = Tensor::from_host(Values{2.5}, {1}, DType::f64);
    const Tensor targets = Tensor::empty({0}, DType::i32);
    ops::cross_entropy_forward(rows, rows, rows, none(6), targets);
    ops::cross_entropy_loss(loss, rows, rows, rows, rows, 1);
    ops::cross_entropy_backward(none(6), none(6), targets, rows, 0, 1);
    REQUIRE(loss.item() == 2.5);
  }
}

TEST_CASE("the weight gradient of zero rows is zero, or adds nothing") {
  const OnDevice cpu;
  Random random(1);
  for (DType dtype : kFloatDTypes) {
    for (bool accumulate : {false, true}) {
      CAPTURE(name(dtype), accumulate);
      const DType acc = accumulate_dtype(dtype);
      const auto check = [&](const Shape& shape, const std::function<void(const Tensor&)>& run) {
        const Tensor gradient = random.tensor(shape, acc), before = clone(gradient);
        run(gradient);
        const Tensor expected = accumulate ? before : Tensor::zeros(shape, acc);
        REQUIRE(same_bits(gradient, expected));
      };
      const Tensor none = Tensor::empty({0, 6}, dtype), rstd = Tensor::empty({0}, acc);
      const Tensor tokens = Tensor::empty({0}, DType::i32);
      check({4, 6}, [&](const Tensor& dweight) {
        ops::linear_backward_weight(dweight, Tensor::empty({0, 4}, dtype), none, accumulate);
      });
      check({4, 6}, [&](const Tensor& dweight) {
        const Tensor head = random.tensor({4, 6}, dtype);
        ops::linear_cross_entropy_forward(rstd, rstd, rstd, none, head, tokens, 0, /*rows=*/2);
        ops::linear_cross_entropy_backward(none, dweight, none, head, tokens, rstd, 0, /*scale=*/1,
                                           /*rows=*/2, accumulate);
      });
      check({6}, [&](const Tensor& dweight) {
        ops::rmsnorm_backward_weight(dweight, none, none, rstd, accumulate);
      });
      check({5, 6}, [&](const Tensor& dtable) {
        ops::embedding_backward(dtable, none, tokens, 0, accumulate);
      });
    }
  }
}

TEST_CASE("matmul accepts an output without rows or columns") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    for (bool accumulate : {false, true}) {
      ops::matmul(Tensor::empty({0, 5}, dtype), Tensor::empty({0, 3}, dtype),
                  Tensor::empty({3, 5}, dtype), accumulate);
      ops::matmul(Tensor::empty({5, 0}, dtype), Tensor::empty({5, 3}, dtype),
                  Tensor::empty({3, 0}, dtype), accumulate);
      ops::matmul(Tensor::empty({0, 0}, dtype), Tensor::empty({0, 0}, dtype),
                  Tensor::empty({0, 0}, dtype), accumulate);
    }
  }
}

TEST_CASE("an empty shard of the vocabulary looks up zeros and contributes nothing to the loss") {
  const OnDevice cpu;
  Random random(2);
  const Tensor tokens = random.token_tensor(4, 10), dy = random.tensor({4, 3});
  const Tensor y = random.tensor({4, 3}), empty_table = Tensor::empty({0, 3}, DType::f64);
  ops::embedding_forward(y, empty_table, tokens, 5);
  check_close(y, Values(12, 0.0), 0);
  ops::embedding_backward(empty_table, dy, tokens, 5, false);
  const Tensor max = Tensor::empty({4}, DType::f64), sum = Tensor::empty({4}, DType::f64);
  const Tensor target = Tensor::empty({4}, DType::f64), none = Tensor::empty({4, 0}, DType::f64);
  ops::cross_entropy_forward(max, sum, target, none, tokens, 5);
  check_close(max, Values(4, -kInf), 0, "max");
  check_close(sum, Values(4, 0.0), 0, "sum");
  check_close(target, Values(4, 0.0), 0, "target logit");
  ops::cross_entropy_backward(none, none, tokens, sum, 5, 1);
}

TEST_CASE("attention accepts no sample, no query and no key") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    for (bool naive : {true, false}) {
      CAPTURE(name(dtype), naive);
      AttentionRun no_samples({0, 2, 1, 4, {0, 5}, {0, 5}}, dtype, naive, 1);
      no_samples.backward();
      AttentionRun no_queries({2, 2, 1, 4, {}, {0, 5}}, dtype, naive, 2);
      check_close(no_queries.backward().dk, Values(2 * 5 * 4, 0.0), 0, "dk");
      AttentionRun no_keys({2, 2, 1, 4, {0, 5}, {}}, dtype, naive, 3);
      check_close(no_keys.out, Values(2 * 5 * 2 * 4, 0.0), 0, "out");
      check_close(no_keys.lse, Values(2 * 2 * 5, -kInf), 0, "lse");
      check_close(no_keys.backward().dq, Values(2 * 5 * 2 * 4, 0.0), 0, "dq");
      const DType acc = accumulate_dtype(dtype);
      const Tensor none = Tensor::empty({2, 0, 2, 4}, acc), lse = Tensor::empty({2, 2, 0}, acc);
      ops::attention_merge(none, lse, none, lse);
      ops::attention_rescale(Tensor::empty({2, 2, 0, 5}, dtype), lse, lse);
      ops::attention_rescale(Tensor::empty({2, 2, 5, 0}, dtype), no_keys.lse, no_keys.lse);
    }
  }
}

TEST_CASE("the optimizer accepts an empty range of parameters") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    const Tensor value = Tensor::empty({0}, dtype);
    const Tensor state = Tensor::empty({0}, accumulate_dtype(dtype));
    const Tensor one = Tensor::from_host(Values{1}, {1}, DType::f64);
    ops::adamw(value, state, state, state, state, one, {});
    const Tensor sum = Tensor::from_host(Values{3}, {1}, DType::f64);
    ops::sum_squares(sum, value);
    REQUIRE(sum.item() == 0);
    const Tensor coefficient = Tensor::empty({1}, DType::f64);
    const Tensor norm = Tensor::empty({1}, DType::f64);
    ops::clip_coefficient(coefficient, norm, Tensor::empty({0}, DType::f64), 1);
    REQUIRE(norm.item() == 0);
    REQUIRE(coefficient.item() == 1);
  }
}

}  // namespace
}  // namespace usp::test
