#include "attention_case.h"

namespace usp::test {
namespace {

TEST_CASE("attention's gradients agree with finite differences, naive and blockwise") {
  const OnDevice cpu;
  uint64_t seed = 10;
  for_each_attention([&](const AttentionCase& c, bool naive) {
    AttentionRun run(c, DType::f64, naive, seed += 3);
    const auto gradients = run.backward();
    const auto check = [&](const Tensor& gradient, Tensor AttentionRun::*input, const char* what) {
      // The inputs are slices; the finite differences move elements of a dense copy.
      const Tensor slice = run.*input, dense = clone(slice);
      const auto loss = [&] {
        ops::copy(slice, dense);
        run.forward();
        return dot(run.out, run.dout);
      };
      check_gradient(gradient, dense, loss, what, /*samples=*/25);
      loss();
    };
    check(gradients.dq, &AttentionRun::q, "dq");
    check(gradients.dk, &AttentionRun::k, "dk");
    check(gradients.dv, &AttentionRun::v, "dv");
  });
}

TEST_CASE("attention's gradients in f32 and bf16 follow those in f64") {
  const OnDevice cpu;
  for_each_attention([](const AttentionCase& c, bool naive) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      CAPTURE(name(dtype));
      AttentionRun run(c, dtype, naive, 5), exact(c, DType::f64, naive, 5);
      for (auto input :
           {&AttentionRun::q, &AttentionRun::k, &AttentionRun::v, &AttentionRun::dout}) {
        ops::copy(exact.*input, run.*input);
      }
      exact.forward();
      const auto actual = run.backward(), expected = exact.backward();
      // A score's gradient is the difference of two rounded terms, dprobs and delta, which nearly
      // cancel where a query sees few keys; naive bf16 attention stores dprobs and dscores as well.
      const double tolerance = dtype == DType::f32 ? 2e-5 : naive ? 5e-2 : 2e-2;
      check_close(actual.dq, expected.dq, tolerance, "dq");
      check_close(actual.dk, expected.dk, tolerance, "dk");
      check_close(actual.dv, expected.dv, tolerance, "dv");
    }
  });
}

TEST_CASE("attention adds its gradients to slices of a fused tensor and touches nothing else") {
  const OnDevice cpu;
  for_each_attention([](const AttentionCase& c, bool naive) {
    for (DType dtype : {DType::f64, DType::f32}) {
      CAPTURE(name(dtype));
      AttentionRun run(c, dtype, naive, 6);
      Random random(7);
      const Tensor fused_q = random.tensor({c.B, c.S(), c.N + 2, c.D}, dtype);
      const Tensor fused_kv = random.tensor({c.B, c.K(), 2 * c.G + 1, c.D}, dtype);
      const Tensor before_q = clone(fused_q), before_kv = clone(fused_kv);
      const auto gradients_of = [&](const Tensor& q, const Tensor& kv) {
        return AttentionRun::Gradients{q.narrow(2, 1, c.N), kv.narrow(2, 0, c.G),
                                       kv.narrow(2, c.G, c.G)};
      };
      const auto fused = gradients_of(fused_q, fused_kv);
      const auto before = gradients_of(before_q, before_kv);
      run.backward(fused);
      const auto added = run.backward();
      const auto check_sum = [&](const Tensor& sum, const Tensor& start, const Tensor& term) {
        Values expected = start.items();
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += term.item(i);
        check_close(sum, expected, tolerance_of(dtype));
      };
      check_sum(fused.dq, before.dq, added.dq);
      check_sum(fused.dk, before.dk, added.dk);
      check_sum(fused.dv, before.dv, added.dv);
      REQUIRE(same_bits(fused_q.narrow(2, 0, 1), before_q.narrow(2, 0, 1)));
      REQUIRE(same_bits(fused_q.narrow(2, c.N + 1, 1), before_q.narrow(2, c.N + 1, 1)));
      REQUIRE(same_bits(fused_kv.narrow(2, 2 * c.G, 1), before_kv.narrow(2, 2 * c.G, 1)));
    }
  });
}

/// What a ring of ranks does: each part of the keys alone, then the results merged.
struct Merged {
  Tensor out, lse;
  AttentionRun::Gradients gradients;
};

Merged attention_in_parts(AttentionRun& whole, const std::vector<Positions>& parts) {
  const AttentionCase& c = whole.c;
  Values out(c.q_shape().numel()), lse(c.lse_shape().numel(), -kInf);
  const auto for_each_part = [&](const auto& body) {
    int64_t first = 0;
    for (const Positions& keys : parts) {
      const Tensor k = whole.k.narrow(1, first, keys.count());
      const Tensor v = whole.v.narrow(1, first, keys.count());
      const Tensor probs =
          whole.naive ? Tensor::empty({c.B, c.N, c.S(), keys.count()}, DType::f64) : Tensor();
      body(keys, k, v, probs, first);
      first += keys.count();
    }
  };
  for_each_part([&](const Positions& keys, const Tensor& k, const Tensor& v, const Tensor& probs,
                    int64_t) {
    const Tensor part_out = Tensor::empty(c.q_shape(), DType::f64);
    const Tensor part_lse = Tensor::empty(c.lse_shape(), DType::f64);
    ops::attention_forward(part_out, part_lse, probs, whole.q, k, v, whole.scale, c.queries, keys);
    const Values o = part_out.items(), l = part_lse.items();
    for (int64_t row = 0; row < c.lse_shape().numel(); ++row) {
      const int64_t b = row / (c.N * c.S()), n = row / c.S() % c.N, s = row % c.S();
      const double top = std::max(lse[row], l[row]);
      if (top == -kInf) continue;
      const double sum = top + std::log(std::exp(lse[row] - top) + std::exp(l[row] - top));
      for (int64_t d = 0; d < c.D; ++d) {
        const int64_t i = ((b * c.S() + s) * c.N + n) * c.D + d;
        out[i] = out[i] * std::exp(lse[row] - sum) + o[i] * std::exp(l[row] - sum);
      }
      lse[row] = sum;
    }
  });

  Merged merged{Tensor::from_host(out, c.q_shape(), DType::f64),
                Tensor::from_host(lse, c.lse_shape(), DType::f64),
                {Tensor::zeros(c.q_shape(), DType::f64), Tensor::zeros(c.k_shape(), DType::f64),
                 Tensor::zeros(c.k_shape(), DType::f64)}};
  const Tensor delta = Tensor::empty(c.lse_shape(), DType::f64);
  ops::attention_delta(delta, whole.dout, merged.out);
  for_each_part([&](const Positions& keys, const Tensor& k, const Tensor& v, const Tensor&,
                    int64_t first) {
    // Probabilities of the finished row are not those of the part, so they are recomputed.
    ops::attention_backward(merged.gradients.dq, merged.gradients.dk.narrow(1, first, keys.count()),
                            merged.gradients.dv.narrow(1, first, keys.count()), whole.dout, {},
                            whole.q, k, v, merged.lse, delta, whole.scale, c.queries, keys);
  });
  return merged;
}

TEST_CASE("attention over parts of the keys, merged by log-sum-exp, equals attention over all") {
  const OnDevice cpu;
  struct Split {
    AttentionCase whole;
    std::vector<Positions> parts;
  };
  const Split splits[] = {
      {{2, 4, 2, 6, {0, 12}, {0, 12}}, {{0, 5}, {5, 7}}},
      {{1, 2, 1, 8, {0, 150}, {0, 150}}, {{0, 97}, {97, 53}}},
      {{1, 2, 1, 8, {0, 30}, {0, 30}}, {{0, 10}, {10, 10}, {20, 10}}},
      // The chunk of a rank from the front, and its chunk from the back.
      {{1, 2, 2, 4, {4, 4, 8, 4}, {0, 4, 12, 4}}, {{0, 4}, {12, 4}}},
      {{1, 2, 2, 4, {0, 4, 12, 4}, {4, 4, 8, 4}}, {{4, 4}, {8, 4}}},
  };
  for (const Split& split : splits) {
    for (bool naive : {true, false}) {
      CAPTURE(split.whole.S(), split.whole.K(), split.whole.queries[0], naive);
      AttentionRun whole(split.whole, DType::f64, naive, 20);
      const auto expected = whole.backward();
      const Merged merged = attention_in_parts(whole, split.parts);
      check_close(merged.out, whole.out, 1e-12, "out");
      check_close(merged.lse, whole.lse, 1e-12, "lse");
      check_close(merged.gradients.dq, expected.dq, 1e-12, "dq");
      check_close(merged.gradients.dk, expected.dk, 1e-12, "dk");
      check_close(merged.gradients.dv, expected.dv, 1e-12, "dv");
    }
  }
}

}  // namespace
}  // namespace usp::test
