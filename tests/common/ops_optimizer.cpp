#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

/// The state of one AdamW range and its update by the formula, in f64.
struct Adam {
  Adam(Random& random, int64_t numel, DType dtype)
      : acc(accumulate_dtype(dtype)),
        master(random.tensor({numel}, acc)),
        value(dtype == acc ? master : Tensor::from_host(master.items(), {numel}, dtype)),
        m(random.tensor({numel}, acc, 0.1)),
        v(Tensor::from_host(squares(random, numel), {numel}, acc)),
        grad(random.tensor({numel}, acc)),
        coefficient(Tensor::from_host(Values{0.7}, {1}, DType::f64)) {
    settings.lr = 0.03;
    settings.beta1 = 0.8;
    settings.beta2 = 0.9;
    settings.eps = 1e-3;
    settings.weight_decay = 0.2;
    settings.step = 4;
  }

  static Values squares(Random& random, int64_t numel) {
    Values values = random.normals(numel);
    for (double& value : values) value *= value;
    return values;
  }

  void update() const { ops::adamw(value, master, m, v, grad, coefficient, settings); }

  struct Expected {
    Values master, m, v;
  };
  Expected formula() const {
    Expected next{master.items(), m.items(), v.items()};
    const AdamWSettings& s = settings;
    for (size_t i = 0; i < next.m.size(); ++i) {
      const double g = grad.item(i) * coefficient.item();
      next.m[i] = s.beta1 * next.m[i] + (1 - s.beta1) * g;
      next.v[i] = s.beta2 * next.v[i] + (1 - s.beta2) * g * g;
      const double m_hat = next.m[i] / (1 - std::pow(s.beta1, double(s.step)));
      const double v_hat = next.v[i] / (1 - std::pow(s.beta2, double(s.step)));
      next.master[i] =
          next.master[i] * (1 - s.lr * s.weight_decay) - s.lr * m_hat / (std::sqrt(v_hat) + s.eps);
    }
    return next;
  }

  DType acc;
  Tensor master, value, m, v, grad, coefficient;
  AdamWSettings settings;
};

TEST_CASE("AdamW follows the formula over several steps") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    Random random(1);
    Adam adam(random, 1001, dtype);
    for (adam.settings.step = 1; adam.settings.step <= 5; ++adam.settings.step) {
      const Adam::Expected expected = adam.formula();
      adam.update();
      const double tolerance = dtype == DType::f64 ? 1e-14 : 1e-6;
      check_close(adam.m, expected.m, tolerance, "m");
      check_close(adam.v, expected.v, tolerance, "v");
      check_close(adam.master, expected.master, tolerance, "master");
      REQUIRE(same_bits(adam.value, Tensor::from_host(adam.master.items(), {1001}, dtype)));
      adam.grad.assign(random.normals(1001));
    }
  }
}

TEST_CASE("AdamW of several ranges leaves what a call for each leaves, to the bit") {
  const OnDevice device;
  const auto expect_same = [](const std::vector<int64_t>& sizes, DType dtype, DType of_gradient) {
    Random one(5), other(5);
    std::vector<Adam> apart, together;
    std::vector<AdamWRange> ranges;
    for (int64_t numel : sizes) {
      apart.emplace_back(one, numel, dtype);
      together.emplace_back(other, numel, dtype);
      for (Adam* adam : {&apart.back(), &together.back()}) {
        adam->grad = Tensor::from_host(adam->grad.items(), {numel}, of_gradient);
      }
      Adam& adam = together.back();
      const double decay = 0.1 * double(apart.size() % 3);
      apart.back().settings.weight_decay = decay;
      ranges.push_back({adam.value, adam.master, adam.m, adam.v, adam.grad, decay});
    }
    for (const Adam& adam : apart) adam.update();
    ops::adamw(ranges, together[0].coefficient, together[0].settings);
    for (size_t i = 0; i < sizes.size(); ++i) {
      CAPTURE(i, sizes[i]);
      REQUIRE(same_bits(together[i].value, apart[i].value));
      REQUIRE(same_bits(together[i].master, apart[i].master));
      REQUIRE(same_bits(together[i].m, apart[i].m));
      REQUIRE(same_bits(together[i].v, apart[i].v));
    }
  };
  for (DType dtype : kFloatDTypes) {
    for (DType of_gradient : {dtype, accumulate_dtype(dtype)}) {
      CAPTURE(name(dtype), name(of_gradient));
      expect_same({8192, 64, 1001, 0, 4096, 1, 4097}, dtype, of_gradient);
      if (dtype == DType::f64) continue;
      expect_same(std::vector<int64_t>(70, 8), dtype, of_gradient);  // more than a launch takes
      expect_same(std::vector<int64_t>(33, 5), dtype, of_gradient);
    }
  }
}

TEST_CASE("ranges of other dtypes do not go together") {
  const OnDevice cpu;
  Random random(6);
  const Adam f32(random, 8, DType::f32), f64(random, 8, DType::f64);
  std::vector<AdamWRange> ranges;
  for (const Adam* adam : {&f32, &f64}) {
    ranges.push_back({adam->value, adam->master, adam->m, adam->v, adam->grad});
  }
  const auto update = [&] { ops::adamw(ranges, f32.coefficient, f32.settings); };
  check_throws<Error>(update, {"adamw: value holds f64, expected f32"});
  ops::adamw({}, f32.coefficient, f32.settings);  // none: nothing to do
}

TEST_CASE("AdamW without decay leaves a weight without gradient where it is") {
  const OnDevice cpu;
  Random random(2);
  Adam adam(random, 50, DType::f32);
  for (const Tensor& zero : {adam.grad, adam.m, adam.v}) ops::fill(zero, 0);
  adam.settings.weight_decay = 0;
  const Tensor before = clone(adam.master);
  adam.update();
  REQUIRE(same_bits(adam.master, before));
}

TEST_CASE("AdamW with a NaN coefficient leaves every bit as it is") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    Random random(3);
    Adam adam(random, 77, dtype);
    ops::fill(adam.coefficient, kNaN);
    adam.grad.assign(Values(77, kInf));
    const Tensor before[] = {clone(adam.value), clone(adam.master), clone(adam.m), clone(adam.v)};
    adam.update();
    REQUIRE(same_bits(adam.value, before[0]));
    REQUIRE(same_bits(adam.master, before[1]));
    REQUIRE(same_bits(adam.m, before[2]));
    REQUIRE(same_bits(adam.v, before[3]));
  }
}

TEST_CASE("sum_squares adds the squares in f64") {
  const OnDevice cpu;
  Random random(4);
  for (DType dtype : kFloatDTypes) {
    for (int64_t numel : {1, 100, 4096, 20001}) {
      CAPTURE(name(dtype), numel);
      const Tensor x = random.tensor({numel}, dtype), sum = Tensor::empty({1}, DType::f64);
      ops::sum_squares(sum, x);
      double expected = 0;
      for (double value : x.items()) expected += value * value;
      check_close(Values{sum.item()}, Values{expected}, 1e-13);
    }
  }
  const Tensor large = Tensor::from_host(Values(10, 1e30), {10}, DType::f32);
  const Tensor sum = Tensor::empty({1}, DType::f64);
  ops::sum_squares(sum, large);  // the squares do not exist in f32
  check_close(Values{sum.item()}, Values{1e61}, 1e-6);
}

TEST_CASE("the squares of several tensors are those of each, whether a device fuses or not") {
  OnDevice device;
  Random random(7);
  for (DType dtype : kFloatDTypes) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{16385, 64, 1001, 0, 40000, 1}, std::vector<int64_t>(70, 9)}) {
      CAPTURE(name(dtype), sizes.size());
      long double exact = 2;  // f64 would lose more than what is tested
      std::vector<Tensor> all;
      for (int64_t numel : sizes) {
        all.push_back(random.tensor({numel}, dtype));
        for (double value : all.back().items()) exact += value * value;
      }
      const double expected = static_cast<double>(exact);
      for (bool fused : {false, true}) {
        device.runtime.backend().fuse(fused);
        const Tensor together = Tensor::from_host(Values{2}, {1}, DType::f64);
        ops::add_squares(together, all);
        ops::add_squares(together, {});  // none: nothing to do
        check_close(together, Values{expected}, 1e-13);
      }
    }
  }
  const std::vector<Tensor> mixed = {Tensor::zeros({3}, DType::f32),
                                     Tensor::zeros({3}, DType::f64)};
  check_throws<Error>([&] { ops::add_squares(Tensor::zeros({1}, DType::f64), mixed); },
                      {"add_squares: x holds f64, expected f32"});
}

struct Clipped {
  double norm, coefficient;
};

Clipped clip(const Values& sums, double max_norm) {
  const Tensor coefficient = Tensor::empty({1}, DType::f64), norm = Tensor::empty({1}, DType::f64);
  ops::clip_coefficient(coefficient, norm, Tensor::from_host(sums, {std::ssize(sums)}, DType::f64),
                        max_norm);
  return {norm.item(), coefficient.item()};
}

TEST_CASE("the clipping coefficient is min(1, max_norm / norm)") {
  const OnDevice cpu;
  const Clipped above = clip({9, 16}, 2);
  REQUIRE(above.norm == 5);
  REQUIRE(above.coefficient == 0.4);
  REQUIRE(clip({9, 16}, 5).coefficient == 1);
  REQUIRE(clip({9, 16}, 50).coefficient == 1);
  REQUIRE(clip({9, 16}, 50).norm == 5);
}

TEST_CASE("a norm of 0 and a max_norm of 0 both mean no clipping") {
  const OnDevice cpu;
  REQUIRE(clip({0, 0}, 1).norm == 0);
  REQUIRE(clip({0, 0}, 1).coefficient == 1);
  REQUIRE(clip({0, 0}, 0).coefficient == 1);
  REQUIRE(clip({1e6}, 0).coefficient == 1);
  REQUIRE(clip({1e6}, 0).norm == 1e3);
}

TEST_CASE("a norm that is not finite is reported and makes the coefficient NaN") {
  const OnDevice cpu;
  for (double max_norm : {0.0, 1.0}) {
    CAPTURE(max_norm);
    REQUIRE(clip({1, kInf}, max_norm).norm == kInf);
    REQUIRE(std::isnan(clip({1, kInf}, max_norm).coefficient));
    REQUIRE(std::isnan(clip({kNaN, 1}, max_norm).norm));
    REQUIRE(std::isnan(clip({kNaN, 1}, max_norm).coefficient));
  }
}

}  // namespace
}  // namespace usp::test
