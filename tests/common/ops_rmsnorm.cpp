#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

/// The inputs of one norm and what its forward pass makes of them.
struct Norm {
  Norm(Random& random, int64_t T, int64_t H, DType dtype, double eps = 0.5)
      : eps(eps),
        x(random.tensor({T, H}, dtype)),
        weight(random.tensor({H}, dtype)),
        dy(random.tensor({T, H}, dtype)),
        dresidual(random.tensor({T, H}, dtype)),
        y(Tensor::empty({T, H}, dtype)),
        rstd(Tensor::empty({T}, accumulate_dtype(dtype))) {
    forward();
  }
  void forward() { ops::rmsnorm_forward(y, rstd, x, weight, eps); }

  double eps;
  Tensor x, weight, dy, dresidual, y, rstd;
};

TEST_CASE("RMSNorm divides each row by its root mean square") {
  const OnDevice cpu;
  Random random(1);
  for (DType dtype : kFloatDTypes) {
    for (int64_t H : {1, 7, 64, 193}) {
      CAPTURE(name(dtype), H);
      const Norm norm(random, 5, H, dtype);
      const Values x = norm.x.items(), weight = norm.weight.items();
      Values rstd, y;
      for (int64_t t = 0; t < 5; ++t) {
        double squares = 0;
        for (int64_t h = 0; h < H; ++h) squares += x[t * H + h] * x[t * H + h];
        rstd.push_back(1 / std::sqrt(squares / double(H) + norm.eps));
        for (int64_t h = 0; h < H; ++h) y.push_back(x[t * H + h] * rstd[t] * weight[h]);
      }
      check_close(norm.rstd, rstd, tolerance_of(accumulate_dtype(dtype)), "rstd");
      check_close(norm.y, y, tolerance_of(dtype), "y");
    }
  }
}

TEST_CASE("RMSNorm's eps keeps a row of zeros finite") {
  const OnDevice cpu;
  Random random(2);
  Norm norm(random, 2, 8, DType::f32, 1e-5);
  ops::fill(norm.x, 0);
  norm.forward();
  check_close(norm.y, Values(16, 0.0), 0);
  check_close(norm.rstd, Values(2, 1 / std::sqrt(1e-5)), 1e-6);
}

TEST_CASE("RMSNorm's gradients agree with finite differences") {
  const OnDevice cpu;
  for (uint64_t seed : {3, 4, 5, 6}) {
    Random random(seed);
    const int64_t T = random.integer(1, 7), H = random.integer(1, 80);
    CAPTURE(T, H);
    Norm norm(random, T, H, DType::f64);
    const auto loss = [&] {
      norm.forward();
      return dot(norm.y, norm.dy);
    };
    const Tensor dx = Tensor::empty({T, H}, DType::f64), dweight = Tensor::empty({H}, DType::f64);
    ops::rmsnorm_backward_input(dx, norm.dy, norm.x, norm.weight, norm.rstd, {});
    check_gradient(dx, norm.x, loss, "dx");
    norm.forward();
    ops::rmsnorm_backward_weight(dweight, norm.dy, norm.x, norm.rstd, false);
    check_gradient(dweight, norm.weight, loss, "dweight");
  }
}

TEST_CASE("RMSNorm adds the gradient that reaches its input past the norm, in place too") {
  const OnDevice cpu;
  Random random(7);
  const int64_t T = 6, H = 35;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const Norm norm(random, T, H, dtype);
    const auto backward = [&](const Tensor& dx, const Tensor& dy, const Tensor& dresidual) {
      ops::rmsnorm_backward_input(dx, dy, norm.x, norm.weight, norm.rstd, dresidual);
    };
    const Tensor through = Tensor::empty({T, H}, dtype), both = Tensor::empty({T, H}, dtype);
    backward(through, norm.dy, {});
    backward(both, norm.dy, norm.dresidual);
    Values expected = through.items();
    for (int64_t i = 0; i < T * H; ++i) expected[i] += norm.dresidual.item(i);
    check_close(both, expected, tolerance_of(dtype));

    const Tensor into_dy = clone(norm.dy), into_dresidual = clone(norm.dresidual);
    backward(into_dy, into_dy, norm.dresidual);
    backward(into_dresidual, norm.dy, into_dresidual);
    REQUIRE(same_bits(into_dy, both));
    REQUIRE(same_bits(into_dresidual, both));
  }
}

TEST_CASE("RMSNorm's weight gradient sums over all rows, over the old one or onto it") {
  const OnDevice cpu;
  Random random(8);
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const int64_t T = 150, H = 9;  // several blocks of rows
    const DType acc = accumulate_dtype(dtype);
    const Norm norm(random, T, H, dtype);
    const Tensor before = random.tensor({H}, acc);
    Values sums(H);
    for (int64_t i = 0; i < T * H; ++i) {
      sums[i % H] += norm.dy.item(i) * norm.x.item(i) * norm.rstd.item(i / H);
    }
    const Tensor dweight = clone(before), added = clone(before);
    ops::rmsnorm_backward_weight(dweight, norm.dy, norm.x, norm.rstd, /*accumulate=*/false);
    check_close(dweight, sums, tolerance_of(acc), "overwritten");
    ops::rmsnorm_backward_weight(added, norm.dy, norm.x, norm.rstd, /*accumulate=*/true);
    for (int64_t h = 0; h < H; ++h) sums[h] += before.item(h);
    check_close(added, sums, tolerance_of(acc), "added");
  }
}

TEST_CASE("RMSNorm's input gradient in f32 and bf16 follows the one in f64") {
  const OnDevice cpu;
  for (DType dtype : {DType::f32, DType::bf16}) {
    CAPTURE(name(dtype));
    Random random(9);
    const int64_t T = 8, H = 70;
    const Norm norm(random, T, H, dtype);
    const auto exact = [&](const Tensor& x) {
      return Tensor::from_host(x.items(), x.shape(), DType::f64);
    };
    const Tensor dx = Tensor::empty({T, H}, dtype), dx64 = Tensor::empty({T, H}, DType::f64);
    ops::rmsnorm_backward_input(dx, norm.dy, norm.x, norm.weight, norm.rstd, norm.dresidual);
    ops::rmsnorm_backward_input(dx64, exact(norm.dy), exact(norm.x), exact(norm.weight),
                                exact(norm.rstd), exact(norm.dresidual));
    check_close(dx, dx64, tolerance_of(dtype));
  }
}

}  // namespace
}  // namespace usp::test
