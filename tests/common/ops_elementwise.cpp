#include <array>

#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// cos and sin [positions, pairs] of arbitrary angles.
std::array<Tensor, 2> random_rotations(Random& random, int64_t positions, int64_t pairs,
                                       DType dtype = DType::f64) {
  Values cosines, sines;
  for (int64_t i = 0; i < positions * pairs; ++i) {
    const double angle = 3 * random.normal();
    cosines.push_back(std::cos(angle));
    sines.push_back(std::sin(angle));
  }
  const DType acc = accumulate_dtype(dtype);
  return {Tensor::from_host(cosines, {positions, pairs}, acc),
          Tensor::from_host(sines, {positions, pairs}, acc)};
}

TEST_CASE("fill writes its value to every element of a tensor and to no neighbour") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    const Tensor whole = Tensor::zeros({5, 7}, dtype);
    ops::fill(whole.narrow(0, 1, 3), -2.5);
    const Values values = whole.items();
    for (int64_t i = 0; i < 35; ++i) REQUIRE(values[i] == (i >= 7 && i < 28 ? -2.5 : 0.0));
  }
}

TEST_CASE("copy converts between dtypes, rounding each element once") {
  const OnDevice cpu;
  Random random(1);
  for (DType from : kFloatDTypes) {
    const Tensor x = random.tensor({3, 5}, from);
    for (DType to : kFloatDTypes) {
      CAPTURE(name(from), name(to));
      const Tensor y = Tensor::empty({3, 5}, to);
      ops::copy(y, x);
      REQUIRE(same_bits(y, Tensor::from_host(x.items(), {3, 5}, to)));
    }
  }
  const Tensor tokens = random.token_tensor(9, 50), copied = Tensor::empty({9}, DType::i32);
  ops::copy(copied, tokens);
  REQUIRE(same_bits(copied, tokens));
}

TEST_CASE("copy reads and writes tensors of any strides") {
  const OnDevice cpu;
  Random random(2);
  const Tensor x = random.tensor({4, 6, 5, 3});
  const Tensor wide = Tensor::zeros({3, 5, 9, 4}, DType::f32);
  const Tensor source = x.narrow(0, 1, 3).narrow(1, 0, 5);                  // [3, 5, 5, 3]
  const Tensor target = wide.narrow(2, 2, 3).narrow(3, 0, 4).transposed();  // [3, 5, 4, 3]
  ops::copy(target, source.narrow(2, 1, 4));
  check_close(target, source.narrow(2, 1, 4), 1e-7);
  check_close(wide.narrow(2, 0, 2), Values(3 * 5 * 2 * 4, 0.0), 0, "left of the target");
  check_close(wide.narrow(2, 5, 4), Values(3 * 5 * 4 * 4, 0.0), 0, "right of the target");
}

TEST_CASE("add gives the sum, also where the result is one of its operands") {
  const OnDevice cpu;
  Random random(3);
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const Tensor a = random.tensor({7, 9}, dtype), b = random.tensor({7, 9}, dtype);
    Values expected = a.items();
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += b.items()[i];
    const Tensor y = Tensor::empty({7, 9}, dtype), into_a = clone(a), into_b = clone(b);
    ops::add(y, a, b);
    check_close(y, expected, tolerance_of(dtype));
    ops::add(into_a, into_a, b);
    ops::add(into_b, a, into_b);
    REQUIRE(same_bits(into_a, y));
    REQUIRE(same_bits(into_b, y));
  }
}

TEST_CASE("SwiGLU is silu(gate) times up") {
  const OnDevice cpu;
  Random random(4);
  const int64_t T = 5, F = 101;
  for (DType dtype : kFloatDTypes) {
    for (double spread : {1.0, 60.0}) {  // far out, exp() overflows or vanishes
      CAPTURE(name(dtype), spread);
      const Tensor gate_up = random.tensor({T, 2 * F}, dtype, spread);
      const Tensor y = Tensor::empty({T, F}, dtype);
      ops::swiglu_forward(y, gate_up);
      const Values x = gate_up.items();
      Values expected;
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t f = 0; f < F; ++f) {
          const double gate = x[t * 2 * F + f], up = x[t * 2 * F + F + f];
          expected.push_back(gate * sigmoid(gate) * up);
        }
      }
      check_close(y, expected, tolerance_of(dtype));
    }
  }
}

TEST_CASE("SwiGLU's gradient agrees with finite differences and may overwrite its input") {
  const OnDevice cpu;
  for (uint64_t seed : {5, 6, 7}) {
    Random random(seed);
    const int64_t T = random.integer(1, 6), F = random.integer(1, 90);
    const Tensor gate_up = random.tensor({T, 2 * F}), dy = random.tensor({T, F});
    const Tensor dgate_up = Tensor::empty({T, 2 * F}, DType::f64);
    ops::swiglu_backward(dgate_up, dy, gate_up);
    const auto loss = [&] {
      const Tensor y = Tensor::empty({T, F}, DType::f64);
      ops::swiglu_forward(y, gate_up);
      return dot(y, dy);
    };
    check_gradient(dgate_up, gate_up, loss, "dgate_up");
    const Tensor in_place = clone(gate_up);
    ops::swiglu_backward(in_place, dy, in_place);
    REQUIRE(same_bits(in_place, dgate_up));
  }
}

TEST_CASE("SwiGLU's gradient in f32 and bf16 follows the one in f64") {
  const OnDevice cpu;
  for (DType dtype : {DType::f32, DType::bf16}) {
    CAPTURE(name(dtype));
    Random random(8);
    const int64_t F = 87;
    const Tensor gate_up = random.tensor({9, 2 * F}, dtype, 3), dy = random.tensor({9, F}, dtype);
    const Tensor exact = Tensor::empty({9, 2 * F}, DType::f64);
    const Tensor dx = Tensor::empty({9, 2 * F}, dtype);
    ops::swiglu_backward(exact, Tensor::from_host(dy.items(), dy.shape(), DType::f64),
                         Tensor::from_host(gate_up.items(), gate_up.shape(), DType::f64));
    ops::swiglu_backward(dx, dy, gate_up);
    check_close(dx, exact, tolerance_of(dtype));
  }
}

TEST_CASE("RoPE turns channels c and c + D/2 by the angle of the row's position") {
  const OnDevice cpu;
  Random random(9);
  const int64_t B = 2, N = 3, D = 10;
  const Positions positions(1, 2, 7, 3);
  const int64_t S = positions.count();
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const auto [cos, sin] = random_rotations(random, positions.end(), D / 2, dtype);
    const Tensor x = random.tensor({B, S, N, D}, dtype), y = clone(x);
    ops::rope(y, cos, sin, positions, /*inverse=*/false);
    Values expected = x.items();
    for (int64_t row = 0; row < B * S * N; ++row) {
      for (int64_t c = 0; c < D / 2; ++c) {
        const int64_t angle = positions[row / N % S] * (D / 2) + c;
        double &x1 = expected[row * D + c], &x2 = expected[row * D + c + D / 2];
        const double r1 = x1 * cos.item(angle) - x2 * sin.item(angle);
        x2 = x2 * cos.item(angle) + x1 * sin.item(angle);
        x1 = r1;
      }
    }
    check_close(y, expected, tolerance_of(dtype));
    ops::rope(y, cos, sin, positions, /*inverse=*/true);
    check_close(y, x, tolerance_of(dtype), "rotated there and back");
  }
}

TEST_CASE("RoPE's gradient is the rotation back") {
  const OnDevice cpu;
  for (uint64_t seed : {10, 11}) {
    Random random(seed);
    const int64_t S = random.integer(2, 6), N = random.integer(1, 3), D = 2 * random.integer(1, 4);
    const Positions positions(3, S);
    const auto [cos, sin] = random_rotations(random, positions.end(), D / 2);
    const Tensor x = random.tensor({2, S, N, D}), dy = random.tensor({2, S, N, D});
    const Tensor dx = clone(dy);
    ops::rope(dx, cos, sin, positions, /*inverse=*/true);
    const auto loss = [&, &cos = cos, &sin = sin] {
      const Tensor y = clone(x);
      ops::rope(y, cos, sin, positions, /*inverse=*/false);
      return dot(y, dy);
    };
    check_gradient(dx, x, loss, "dx");
  }
}

TEST_CASE("RoPE on some heads of a fused tensor leaves the others alone") {
  const OnDevice cpu;
  Random random(12);
  const Positions positions(0, 5);
  const auto [cos, sin] = random_rotations(random, 5, 4);
  const Tensor fused = random.tensor({2, 5, 7, 8}), before = clone(fused);
  const Tensor alone = clone(before.narrow(2, 1, 4));
  ops::rope(alone, cos, sin, positions, false);
  ops::rope(fused.narrow(2, 1, 4), cos, sin, positions, false);
  REQUIRE(same_bits(fused.narrow(2, 1, 4), alone));
  REQUIRE(same_bits(fused.narrow(2, 0, 1), before.narrow(2, 0, 1)));
  REQUIRE(same_bits(fused.narrow(2, 5, 2), before.narrow(2, 5, 2)));
}

}  // namespace
}  // namespace usp::test
