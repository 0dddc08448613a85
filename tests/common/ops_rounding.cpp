#include <array>

#include "tensor/expert_ops.h"
#include "tensor/ops.h"
#include "testing.h"

/// What an op writes in bf16 is what f32 has computed, rounded once: a sum or a product that is
/// rounded on its way as well is off by up to twice as much, and no other test is that fine.
namespace usp::test {
namespace {

/// Each element of y lies within half a unit in the last place of the exact one. `terms`: the size
/// of what f32, and exponentials to 5e-6, have added up to it.
void check_rounded_once(const Tensor& y, const Values& exact, double terms) {
  const Values rounded = y.items();
  REQUIRE(y.dtype() == DType::bf16);
  REQUIRE(rounded.size() == exact.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    const double half = exact[i] == 0 ? 0 : std::ldexp(1.0, std::ilogb(exact[i]) - 8);
    CAPTURE(i, rounded[i], exact[i], half);
    REQUIRE(std::abs(rounded[i] - exact[i]) <= 1.01 * half + 1e-5 * terms);
  }
}

double silu_of(double x) { return x / (1 + std::exp(-x)); }

TEST_CASE("a norm's results in bf16 are rounded once") {
  const OnDevice cpu;
  Random random(11);
  const int64_t T = 6, H = 40;
  const Tensor x = random.tensor({T, H}, DType::bf16), weight = random.tensor({H}, DType::bf16);
  const Tensor y = Tensor::empty({T, H}, DType::bf16), rstd = Tensor::empty({T}, DType::f32);
  ops::rmsnorm_forward(y, rstd, x, weight, 1e-5);
  const Values in = x.items(), w = weight.items(), r = rstd.items();
  Values normed(T * H);
  for (int64_t i = 0; i < T * H; ++i) normed[i] = in[i] * r[i / H] * w[i % H];
  check_rounded_once(y, normed, 1);

  const Tensor dy = random.tensor({T, H}, DType::bf16);
  const Tensor bypass = random.tensor({T, H}, DType::bf16);
  const Values d = dy.items(), past = bypass.items();
  for (bool has_bypass : {false, true}) {
    CAPTURE(has_bypass);
    ops::rmsnorm_backward_input(y, dy, x, weight, rstd, has_bypass ? bypass : Tensor());
    Values gradient(T * H);
    for (int64_t t = 0; t < T; ++t) {
      double along = 0;
      for (int64_t i = t * H; i < (t + 1) * H; ++i) along += d[i] * w[i % H] * in[i];
      along *= r[t] * r[t] * r[t] / double(H);
      for (int64_t i = t * H; i < (t + 1) * H; ++i) {
        gradient[i] = d[i] * w[i % H] * r[t] - in[i] * along + (has_bypass ? past[i] : 0);
      }
    }
    check_rounded_once(y, gradient, 1);
  }
}

TEST_CASE("sums, rotations and gates in bf16 are rounded once") {
  const OnDevice cpu;
  Random random(12);
  const int64_t S = 7, N = 2, D = 16, pairs = D / 2;
  const Tensor a = random.tensor({S, N * D}, DType::bf16);
  const Tensor b = random.tensor({S, N * D}, DType::bf16);
  const Tensor y = Tensor::empty({S, N * D}, DType::bf16);
  ops::add(y, a, b);
  const Values left = a.items(), right = b.items();
  Values expected(left.size());
  for (size_t i = 0; i < left.size(); ++i) expected[i] = left[i] + right[i];
  check_rounded_once(y, expected, 1);

  const Tensor cos = random.tensor({S, pairs}, DType::f32);
  const Tensor sin = random.tensor({S, pairs}, DType::f32);
  ops::rope(a.view({1, S, N, D}), cos, sin, Positions(0, S), /*inverse=*/false);
  const Values c = cos.items(), s = sin.items();
  for (int64_t i = 0; i < S * N * D; ++i) {
    const int64_t angle = i / (N * D) * pairs + i % pairs;
    const bool low = i % D < pairs;
    expected[i] = low ? left[i] * c[angle] - left[i + pairs] * s[angle]
                      : left[i] * c[angle] + left[i - pairs] * s[angle];
  }
  check_rounded_once(a, expected, 2);

  const int64_t F = N * D / 2;
  const Tensor gated = Tensor::empty({S, F}, DType::bf16);
  const Tensor dy = random.tensor({S, F}, DType::bf16);
  const Tensor dgate_up = Tensor::empty({S, 2 * F}, DType::bf16);
  ops::swiglu_forward(gated, b);
  ops::swiglu_backward(dgate_up, dy, b);
  const Values d = dy.items();
  Values product(S * F), gradient(S * 2 * F);
  for (int64_t i = 0; i < S * F; ++i) {
    const int64_t gate = i / F * 2 * F + i % F, up = gate + F;
    const double g = right[gate], u = right[up], sigmoid = 1 / (1 + std::exp(-g));
    product[i] = silu_of(g) * u;
    gradient[gate] = d[i] * u * sigmoid * (1 + g * (1 - sigmoid));
    gradient[up] = d[i] * silu_of(g);
  }
  check_rounded_once(gated, product, 4);
  check_rounded_once(dgate_up, gradient, 4);
}

TEST_CASE("softmax and the loss's gradient in bf16 are rounded once") {
  const OnDevice cpu;
  Random random(13);
  const int64_t S = 37;
  const Shape shape{1, 1, S, S};
  const Tensor scores = random.tensor(shape, DType::bf16);
  const Tensor dprobs = random.tensor(shape, DType::bf16);
  const Tensor probs = Tensor::empty(shape, DType::bf16);
  const Tensor lse = Tensor::empty({1, 1, S}, DType::f32);
  const Tensor delta = random.tensor({1, 1, S}, DType::f32);
  const Positions positions(0, S);
  Backend& backend = Runtime::current().backend();
  backend.causal_softmax_forward(probs, lse, scores, 0.5, positions, positions, {});
  const Values x = scores.items(), d = dprobs.items(), of_row = delta.items();
  Values expected(S * S), gradient(S * S);
  for (int64_t s = 0; s < S; ++s) {
    double sum = 0;
    for (int64_t k = 0; k <= s; ++k) sum += std::exp(0.5 * x[s * S + k]);
    for (int64_t k = 0; k <= s; ++k) expected[s * S + k] = std::exp(0.5 * x[s * S + k]) / sum;
  }
  check_rounded_once(probs, expected, 1);
  const Values p = probs.items();
  for (int64_t i = 0; i < S * S; ++i) gradient[i] = p[i] * (d[i] - of_row[i / S]) * 0.5;
  backend.causal_softmax_backward(dprobs, dprobs, probs, delta, 0.5);
  check_rounded_once(dprobs, gradient, 1);

  const int64_t T = 200, V = 3;  // the target's probability is of the size of what it is taken from
  const Tensor logits = random.tensor({T, V}, DType::bf16);
  const Tensor targets = random.token_tensor(T, V);
  const Tensor row_max = Tensor::empty({T}, DType::f32), row_sum = Tensor::empty({T}, DType::f32);
  const Tensor at_target = Tensor::empty({T}, DType::f32), lses = Tensor::empty({T}, DType::f32);
  const Tensor loss = Tensor::zeros({1}, DType::f64);
  const Tensor dlogits = Tensor::empty({T, V}, DType::bf16);
  ops::cross_entropy_forward(row_max, row_sum, at_target, logits, targets);
  ops::cross_entropy_loss(loss, lses, row_max, row_sum, at_target, 1);
  ops::cross_entropy_backward(dlogits, logits, targets, lses, 0, 0.3);
  const Values z = logits.items(), log_sums = lses.items();
  const std::vector<int64_t> target = targets.counts();
  Values of_logits(T * V);
  for (int64_t i = 0; i < T * V; ++i) {
    of_logits[i] = 0.3 * (std::exp(z[i] - log_sums[i / V]) - (i % V == target[i / V] ? 1 : 0));
  }
  check_rounded_once(dlogits, of_logits, 1);
}

TEST_CASE("what a token's experts return is added up, and rounded once in bf16") {
  OnDevice cpu;
  Random random(14);
  const int64_t T = 9, H = 40, k = 3;
  const Tensor rows = random.tensor({T * k, H}, DType::bf16);
  const Tensor gates = random.tensor({T, k}, DType::f32);
  std::vector<int32_t> slot(T * k);
  for (int64_t i = 0; i < T * k; ++i) slot[i] = static_cast<int32_t>(i * 7 % (T * k));
  slot[4] = -1;  // dropped
  const Tensor slots = Tensor::from_host(slot, {T, k});
  const Values row = rows.items(), gate = gates.items();
  for (bool accumulate : {false, true}) {
    const Tensor y = random.tensor({T, H}, DType::bf16);
    Values expected = y.items();
    for (int64_t i = 0; i < T * H; ++i) {
      if (!accumulate) expected[i] = 0;
      for (int64_t choice = i / H * k; choice < (i / H + 1) * k; ++choice) {
        if (slot[choice] >= 0) expected[i] += gate[choice] * row[slot[choice] * H + i % H];
      }
    }
    CAPTURE(accumulate);
    const Tensor before = clone(y), onto = Tensor::empty({T, H}, DType::bf16);
    ops::unpermute(y, rows, slots, gates, accumulate);
    check_rounded_once(y, expected, 4);
    if (!accumulate) continue;
    cpu.runtime.backend().fuse(true);
    ops::unpermute_onto(onto, before, rows, slots, gates);
    check_rounded_once(onto, expected, 4);
  }
}

}  // namespace
}  // namespace usp::test
