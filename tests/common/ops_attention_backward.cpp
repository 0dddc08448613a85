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
      // The inputs are slices; the finite differences move a dense copy.
      const Tensor slice = run.*input, dense = clone(slice);
      const auto loss = [&] {
        ops::copy(slice, dense);
        run.forward();
        return dot(run.out, run.dout);
      };
      check_gradient_along(gradient, dense, loss, what);
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
        const Values added_values = term.items();
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += added_values[i];
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

}  // namespace
}  // namespace usp::test
