#include "attention_case.h"

namespace usp::test {
namespace {

/// Attention by its definition, in f64.
struct Definition {
  Values out, lse, probs;

  explicit Definition(const AttentionRun& run)
      : out(run.c.q_shape().numel()),
        lse(run.c.lse_shape().numel(), -kInf),
        probs(run.c.probs_shape().numel()) {
    const AttentionCase& c = run.c;
    const Values q = run.q.items(), k = run.k.items(), v = run.v.items();
    for (int64_t b = 0; b < c.B; ++b) {
      for (int64_t n = 0; n < c.N; ++n) {
        const int64_t g = n / (c.N / c.G);
        for (int64_t s = 0; s < c.S(); ++s) {
          const double* query = &q[((b * c.S() + s) * c.N + n) * c.D];
          row(c, c.begins.empty() ? 0 : c.begins[b * c.S() + s], c.queries[s], run.scale, query, b,
              g, k, v, &out[((b * c.S() + s) * c.N + n) * c.D], lse[(b * c.N + n) * c.S() + s],
              &probs[((b * c.N + n) * c.S() + s) * c.K()]);
        }
      }
    }
  }

 private:
  static void row(const AttentionCase& c, int64_t begin, int64_t position, double scale,
                  const double* query, int64_t b, int64_t g, const Values& k, const Values& v,
                  double* out, double& lse, double* probs) {
    double sum = 0;
    for (int64_t j = 0; j < c.K(); ++j) {
      if (c.keys[j] < begin || c.keys[j] > position) continue;
      double score = 0;
      for (int64_t d = 0; d < c.D; ++d) {
        score += query[d] * k[((b * c.K() + j) * c.G + g) * c.D + d];
      }
      sum += probs[j] = std::exp(scale * score);
    }
    if (sum == 0) return;
    lse = std::log(sum);
    for (int64_t j = 0; j < c.K(); ++j) {
      probs[j] /= sum;
      for (int64_t d = 0; d < c.D; ++d) {
        out[d] += probs[j] * v[((b * c.K() + j) * c.G + g) * c.D + d];
      }
    }
  }
};

TEST_CASE("attention agrees with its definition, naive and blockwise, in every dtype") {
  const OnDevice cpu;
  for_each_attention([](const AttentionCase& c, bool naive) {
    for (DType dtype : kFloatDTypes) {
      CAPTURE(name(dtype));
      const AttentionRun run(c, dtype, naive, 1);
      const Definition expected(run);
      // Naive bf16 attention rounds its scores and probabilities, too.
      const double tolerance = (naive && dtype == DType::bf16 ? 3 : 1) * tolerance_of(dtype);
      const double lse_tolerance = naive ? tolerance : tolerance_of(accumulate_dtype(dtype));
      check_close(run.out, expected.out, tolerance, "out");
      check_close(run.lse, expected.lse, lse_tolerance, "lse");
      if (naive) check_close(run.probs, expected.probs, tolerance, "probs");
    }
  });
}

TEST_CASE("naive and blockwise attention are equal in f64") {
  const OnDevice cpu;
  for (const AttentionCase& c : attention_cases()) {
    AttentionRun naive(c, DType::f64, true, 2), blockwise(c, DType::f64, false, 2);
    check_close(blockwise.out, naive.out, 1e-12, "out");
    check_close(blockwise.lse, naive.lse, 1e-12, "lse");
    const auto expected = naive.backward(), actual = blockwise.backward();
    check_close(actual.dq, expected.dq, 1e-12, "dq");
    check_close(actual.dk, expected.dk, 1e-12, "dk");
    check_close(actual.dv, expected.dv, 1e-12, "dv");
  }
}

TEST_CASE("a query that sees no key gets output 0, log-sum-exp -inf and gradient 0") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    for (bool naive : {true, false}) {
      CAPTURE(name(dtype), naive);
      const AttentionCase c{1, 2, 1, 4, {0, 6}, {3, 5}};  // queries 0, 1 and 2 see nothing
      AttentionRun run(c, dtype, naive, 3);
      const auto gradients = run.backward();
      check_close(run.out.narrow(1, 0, 3), Values(3 * 2 * 4, 0.0), 0, "out");
      check_close(run.lse.narrow(2, 0, 3), Values(2 * 3, -kInf), 0, "lse");
      check_close(gradients.dq.narrow(1, 0, 3), Values(3 * 2 * 4, 0.0), 0, "dq");
      // Keys 6 and 7 are seen by nobody; everything else is finite.
      check_close(gradients.dk.narrow(1, 3, 2), Values(2 * 4, 0.0), 0, "dk");
      check_close(gradients.dv.narrow(1, 3, 2), Values(2 * 4, 0.0), 0, "dv");
      for (const Tensor& tensor : {run.out, gradients.dq, gradients.dk, gradients.dv}) {
        for (double value : tensor.items()) REQUIRE(std::isfinite(value));
      }
    }
  }
}

TEST_CASE("attention stays finite where the exponentials of its scores would overflow") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    for (bool naive : {true, false}) {
      CAPTURE(name(dtype), naive);
      AttentionRun run({1, 1, 1, 4, {0, 120}, {0, 120}}, dtype, naive, 4);
      ops::copy(run.q, Random(5).tensor(run.q.shape(), dtype, 100));
      ops::copy(run.k, Random(6).tensor(run.k.shape(), dtype, 100));
      run.forward();
      const auto gradients = run.backward();
      for (const Tensor& tensor : {run.out, run.lse, gradients.dq, gradients.dk, gradients.dv}) {
        for (double value : tensor.items()) REQUIRE(std::isfinite(value));
      }
      double largest = 0;
      for (double value : run.lse.items()) largest = std::max(largest, value);
      REQUIRE(largest > 1000);
    }
  }
}

TEST_CASE("delta is the sum over channels of dout times out") {
  const OnDevice cpu;
  Random random(7);
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const Tensor fused = random.tensor({2, 5, 7, 9}, dtype);
    const Tensor dout = fused.narrow(2, 0, 3), out = fused.narrow(2, 3, 3);
    const Tensor delta = Tensor::empty({2, 3, 5}, accumulate_dtype(dtype));
    ops::attention_delta(delta, dout, out);
    Values expected(30);
    for (int64_t i = 0; i < 2 * 5 * 3 * 9; ++i) {
      const int64_t n = i / 9 % 3, s = i / 27 % 5, b = i / 135;
      expected[(b * 3 + n) * 5 + s] += dout.item(i) * out.item(i);
    }
    check_close(delta, expected, tolerance_of(accumulate_dtype(dtype)));
  }
}

TEST_CASE("changing a later token changes no earlier output") {
  const OnDevice cpu;
  for (bool naive : {true, false}) {
    CAPTURE(naive);
    AttentionRun run({1, 2, 1, 8, {0, 110}, {0, 110}}, DType::f32, naive, 8);
    const Tensor before = clone(run.out);
    ops::copy(run.k.narrow(1, 60, 1), Random(9).tensor({1, 1, 1, 8}, DType::f32));
    ops::copy(run.v.narrow(1, 60, 1), Random(10).tensor({1, 1, 1, 8}, DType::f32));
    run.forward();
    REQUIRE(same_bits(run.out.narrow(1, 0, 60), before.narrow(1, 0, 60)));
    for (int64_t row = 60; row < 110; ++row) {
      REQUIRE(!same_bits(run.out.narrow(1, row, 1), before.narrow(1, row, 1)));
    }
  }
}

TEST_CASE("changing a token changes no output of a later document") {
  const OnDevice cpu;
  for (bool naive : {true, false}) {
    for (int32_t start : {7, 60, 96}) {
      CAPTURE(naive, start);
      const AttentionCase c = with_documents({1, 2, 1, 8, {0, 110}, {0, 110}}, {{start}});
      AttentionRun run(c, DType::f32, naive, 8);
      const Tensor before = clone(run.out);
      const int64_t last = start - 1;  // of the document before
      ops::copy(run.k.narrow(1, last, 1), Random(9).tensor({1, 1, 1, 8}, DType::f32));
      ops::copy(run.v.narrow(1, last, 1), Random(10).tensor({1, 1, 1, 8}, DType::f32));
      run.forward();
      REQUIRE(!same_bits(run.out.narrow(1, last, 1), before.narrow(1, last, 1)));
      REQUIRE(
          same_bits(run.out.narrow(1, start, 110 - start), before.narrow(1, start, 110 - start)));
    }
  }
}

TEST_CASE("blockwise attention computes no tile of an earlier document") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    // All queries are of the document that begins at 288, as do tiles of 96 keys and of 32.
    const AttentionCase c = with_documents({1, 2, 1, 8, {320, 90}, {0, 410}}, {{288}});
    AttentionRun run(c, dtype, /*naive=*/false, 11);
    const auto finite = [](const Tensor& tensor) {
      for (double value : tensor.items()) {
        if (!std::isfinite(value)) return false;
      }
      return true;
    };
    ops::copy(run.k.narrow(1, 0, 288),
              Tensor::from_host(Values(288 * 8, kNaN), {1, 288, 1, 8}, dtype));
    ops::copy(run.v.narrow(1, 0, 288),
              Tensor::from_host(Values(288 * 8, kNaN), {1, 288, 1, 8}, dtype));
    run.forward();
    const auto [dq, dk, dv] = run.backward();
    for (const Tensor& tensor : {run.out, run.lse, dq, dk, dv}) REQUIRE(finite(tensor));
    check_close(dk.narrow(1, 0, 288), Values(288 * 8, 0.0), 0, "dk");
    check_close(dv.narrow(1, 0, 288), Values(288 * 8, 0.0), 0, "dv");
  }
}

}  // namespace
}  // namespace usp::test
