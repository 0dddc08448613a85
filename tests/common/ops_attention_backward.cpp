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

TEST_CASE("gradients of all keys take the place of what was there, and are rounded once") {
  const OnDevice cpu;
  for_each_attention([](const AttentionCase& c, bool naive) {
    for (DType dtype : kFloatDTypes) {
      CAPTURE(name(dtype));
      AttentionRun run(c, dtype, naive, 8);
      check_rounded_once(run);
    }
  });
}

TEST_CASE("naive attention's backward pass takes the memory that it says it takes") {
  for (Device device : {Device::cpu, Device::meta}) {
    OnDevice here(device);
    for (int64_t kv_heads : {2, 6}) {
      const AttentionCase c{2, 6, kv_heads, 8, {0, 20}, {0, 20}};
      for (DType dtype : kFloatDTypes) {
        const DType acc = accumulate_dtype(dtype);
        for (DType of_gradients : {dtype, acc}) {
          CAPTURE(name(device), kv_heads, name(dtype), name(of_gradients));
          const Tensor q = Tensor::empty(c.q_shape(), dtype), k = Tensor::empty(c.k_shape(), dtype);
          const Tensor probs = Tensor::empty(c.probs_shape(), dtype);
          const Tensor lse = Tensor::empty(c.lse_shape(), acc);
          const Tensor dq = Tensor::empty(c.q_shape(), of_gradients);
          const Tensor dk = Tensor::empty(c.k_shape(), of_gradients);
          const Tensor dv = Tensor::empty(c.k_shape(), of_gradients);
          here.allocator().reset_peaks();
          const int64_t before = here.allocator().live_bytes(Category::activations);
          ops::attention_backward(dq, dk, dv, q, probs, q, k, k, lse, lse, 1, c.queries, c.keys,
                                  /*accumulate=*/false);
          const int64_t taken = here.allocator().peak_bytes(Category::activations) - before;
          const int64_t scores = 2 * 6 * 20 * 20 * bytes_of(dtype);
          const bool has_sums = kv_heads < 6 && of_gradients != acc;
          REQUIRE(taken == scores + (has_sums ? 2 * (2 * 20 * 2 * 8) * 4 : 0));
          REQUIRE(taken == ops::naive_attention_workspace(probs, dk));
        }
      }
    }
  }
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
