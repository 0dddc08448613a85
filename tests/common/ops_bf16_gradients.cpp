#include "tensor/ops.h"
#include "testing.h"

/// Weight gradients kept in bf16: what the same op sums in f32, rounded once.
namespace usp::test {
namespace {

constexpr int64_t kTokens = 70, kIn = 24, kOut = 40;

/// `compute` adds its sums to f32 or bf16 gradients, or overwrites them.
void check_rounded(const Shape& shape,
                   const std::function<void(const Tensor& gradient, bool accumulate)>& compute) {
  Random random(5);
  const Tensor old = random.tensor(shape, DType::bf16);
  for (bool accumulate : {false, true}) {
    CAPTURE(accumulate);
    const Tensor wide = Tensor::empty(shape, DType::f32), narrow = clone(old);
    ops::copy(wide, old);
    compute(wide, accumulate);
    compute(narrow, accumulate);
    const Tensor rounded = Tensor::empty(shape, DType::bf16);
    ops::copy(rounded, wide);
    check_close(narrow, rounded, 1.0 / 128);  // the library may cut its sums differently
    // Each element on its own: half a unit in the last place, and what f32 sums may differ by.
    const Values actual = narrow.items(), exact = wide.items();
    for (size_t i = 0; i < actual.size(); ++i) {
      REQUIRE(std::abs(actual[i] - exact[i]) <= std::abs(exact[i]) / 256 + 1e-4);
    }
  }
}

TEST_CASE("bf16 gradients of a linear layer, a norm and an embedding are rounded once") {
  const OnDevice cpu;
  Random random(6);
  const Tensor x = random.tensor({kTokens, kIn}, DType::bf16);
  const Tensor dy = random.tensor({kTokens, kOut}, DType::bf16);
  check_rounded({kOut, kIn}, [&](const Tensor& gradient, bool accumulate) {
    ops::linear_backward_weight(gradient, dy, x, accumulate);
  });
  const Tensor rstd = random.tensor({kTokens}, DType::f32);
  const Tensor dx = random.tensor({kTokens, kIn}, DType::bf16);
  check_rounded({kIn}, [&](const Tensor& gradient, bool accumulate) {
    ops::rmsnorm_backward_weight(gradient, dx, x, rstd, accumulate);
  });
  // Seven tokens each: a sum that rounded every addition would be off by more.
  const Tensor tokens = random.token_tensor(kTokens, 10);
  check_rounded({10, kIn}, [&](const Tensor& gradient, bool accumulate) {
    ops::embedding_backward(gradient, dx, tokens, /*vocab_offset=*/0, accumulate);
  });
}

TEST_CASE("accumulate adds what is narrower without rounding it again") {
  const OnDevice cpu;
  Random random(7);
  for (DType dtype : kFloatDTypes) {
    for (int64_t numel : {0, 1, 5000}) {
      CAPTURE(name(dtype), numel);
      const Tensor x = random.tensor({numel}, dtype);
      const Tensor sum = random.tensor({numel}, accumulate_dtype(dtype));
      Values expected = sum.items();
      const Values added = x.items();
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += added[i];
      ops::accumulate(sum, x);
      check_close(sum, expected, dtype == DType::f64 ? 0 : 1e-7);
    }
  }
  check_throws<Error>(
      [] { ops::accumulate(Tensor::zeros({3}, DType::bf16), Tensor::zeros({3}, DType::bf16)); },
      {"sum", "f32"});
}

TEST_CASE("AdamW reads bf16 gradients as the f32 ones of the same values") {
  const OnDevice cpu;
  Random random(8);
  const int64_t numel = 5000;
  const Tensor grad = random.tensor({numel}, DType::bf16),
               wide = Tensor::empty({numel}, DType::f32);
  ops::copy(wide, grad);
  const Tensor coefficient = Tensor::from_host(Values{0.5}, {1}, DType::f64);
  std::vector<Tensor> results;
  const Tensor start = random.tensor({numel}, DType::f32);
  for (const Tensor& gradient : {grad, wide}) {
    const Tensor value = Tensor::empty({numel}, DType::bf16), master = clone(start);
    const Tensor m = Tensor::zeros({numel}, DType::f32), v = Tensor::zeros({numel}, DType::f32);
    ops::adamw(value, master, m, v, gradient, coefficient, {.lr = 0.1, .weight_decay = 0.1});
    results.insert(results.end(), {value, master, m, v});
  }
  for (size_t i = 0; i < 4; ++i) REQUIRE(same_bits(results[i], results[i + 4]));
  check_throws<Error>(
      [&] {
        ops::adamw(results[0], results[1], results[2], results[3],
                   Tensor::zeros({numel}, DType::f64), coefficient, {});
      },
      {"grad", "f64"});
}

}  // namespace
}  // namespace usp::test
