#include "attention_case.h"

/// Attention over one part of the keys after the other, as the ranks of a ring compute it.
namespace usp::test {
namespace {

/// (out, lse) of attention that has seen no key.
struct Merged {
  Tensor out, lse;

  Merged(const AttentionCase& c, DType dtype)
      : out(Tensor::zeros(c.q_shape(), accumulate_dtype(dtype))),
        lse(Tensor::empty(c.lse_shape(), accumulate_dtype(dtype))) {
    ops::fill(lse, -kInf);
  }
};

/// The keys at some positions, and what attention to them alone gives.
struct Part {
  Positions keys;
  int64_t first;  ///< among all keys
  Tensor out, lse, probs;

  Tensor of(const Tensor& x) const { return x.narrow(1, first, keys.count()); }
};

/// All parts' attention, merged into `merged`.
std::vector<Part> attend(const AttentionRun& whole, const std::vector<Positions>& keys,
                         const Merged& merged) {
  const AttentionCase& c = whole.c;
  std::vector<Part> parts;
  int64_t first = 0;
  for (const Positions& some : keys) {
    Part part{some,
              first,
              Tensor::empty(c.q_shape(), merged.out.dtype()),
              Tensor::empty(c.lse_shape(), merged.lse.dtype()),
              {}};
    if (whole.naive) {
      part.probs = Tensor::empty({c.B, c.N, c.S(), some.count()}, whole.q.dtype());
    }
    ops::attention_forward(part.out, part.lse, part.probs, whole.q, part.of(whole.k),
                           part.of(whole.v), whole.scale, c.queries, some, whole.documents);
    ops::attention_merge(merged.out, merged.lse, part.out, part.lse);
    parts.push_back(part);
    first += some.count();
  }
  return parts;
}

AttentionRun::Gradients backward(AttentionRun& whole, const std::vector<Part>& parts,
                                 const Merged& merged) {
  const DType acc = merged.out.dtype();
  const AttentionRun::Gradients sums{Tensor::zeros(whole.c.q_shape(), acc),
                                     Tensor::zeros(whole.c.k_shape(), acc),
                                     Tensor::zeros(whole.c.k_shape(), acc)};
  const Tensor out = Tensor::empty(whole.c.q_shape(), whole.q.dtype());
  ops::copy(out, merged.out);
  ops::attention_delta(whole.delta, whole.dout, out);
  for (const Part& part : parts) {
    if (whole.naive) ops::attention_rescale(part.probs, part.lse, merged.lse);
    ops::attention_backward(sums.dq, part.of(sums.dk), part.of(sums.dv), whole.dout, part.probs,
                            whole.q, part.of(whole.k), part.of(whole.v), merged.lse, whole.delta,
                            whole.scale, whole.c.queries, part.keys, /*accumulate=*/true,
                            whole.documents);
  }
  return sums;
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
      // The first queries see nothing of the first part, and nobody sees the last.
      {{2, 2, 1, 4, {0, 6}, {3, 9}}, {{3, 3}, {6, 6}}},
      {{1, 2, 1, 4, {120, 30, 300, 30}, {0, 130}}, {{0, 9}, {9, 1}, {10, 60}, {70, 60}}},
      // Documents that begin in another part than the query, in its part, between the parts.
      {with_documents({2, 2, 1, 4, {4, 4, 8, 4}, {0, 4, 12, 4}}, {{2, 10}, {4, 13}}),
       {{0, 4}, {12, 4}}},
      {with_documents({1, 2, 1, 8, {0, 150}, {0, 150}}, {{30, 97, 149}}), {{0, 97}, {97, 53}}},
  };
  for (const Split& split : splits) {
    for (DType dtype : kFloatDTypes) {
      for (bool naive : {true, false}) {
        CAPTURE(split.whole.S(), split.whole.K(), split.whole.queries[0], name(dtype), naive);
        AttentionRun whole(split.whole, dtype, naive, 20),
            exact(split.whole, DType::f64, naive, 20);
        for (auto input :
             {&AttentionRun::q, &AttentionRun::k, &AttentionRun::v, &AttentionRun::dout}) {
          ops::copy(exact.*input, whole.*input);
        }
        exact.forward();
        const auto expected = exact.backward();
        const Merged merged(split.whole, dtype);
        const std::vector<Part> parts = attend(whole, split.parts, merged);
        const auto gradients = backward(whole, parts, merged);
        // As of whole attention: naive bf16 rounds scores and probabilities, here twice.
        const double tolerance = (naive && dtype == DType::bf16 ? 3 : 1) * tolerance_of(dtype);
        check_close(merged.out, exact.out, tolerance, "out");
        check_close(merged.lse, exact.lse, tolerance, "lse");
        const double of_gradients = dtype == DType::f64   ? 1e-12
                                    : dtype == DType::f32 ? 2e-5
                                    : naive               ? 5e-2
                                                          : 2e-2;
        check_close(gradients.dq, expected.dq, of_gradients, "dq");
        check_close(gradients.dk, expected.dk, of_gradients, "dk");
        check_close(gradients.dv, expected.dv, of_gradients, "dv");
      }
    }
  }
}

TEST_CASE("the error of merged bf16 attention does not grow with the number of parts") {
  const OnDevice cpu;
  const AttentionCase c{1, 2, 1, 16, {300, 20}, {0, 256}};
  const AttentionRun whole(c, DType::bf16, /*naive=*/false, 21);
  const Tensor wide = Tensor::empty(c.q_shape(), DType::f32);
  ops::attention_forward(wide, whole.lse, {}, whole.q, whole.k, whole.v, whole.scale, c.queries,
                         c.keys);
  const Tensor rounded = Tensor::empty(c.q_shape(), DType::bf16);
  ops::copy(rounded, wide);
  REQUIRE(same_bits(rounded, whole.out));
  std::vector<Positions> parts;
  for (int64_t first = 0; first < 256; first += 2) parts.emplace_back(first, 2);
  const Merged merged(c, DType::bf16);
  attend(whole, parts, merged);
  check_close(merged.out, wide, 2e-3, "out");  // less than one rounding of the largest
}

TEST_CASE("outputs are merged by their log-sum-exp, however large, and stay 0 where it is -inf") {
  const OnDevice cpu;
  const int64_t B = 2, S = 5, N = 3, D = 37, rows = B * N * S;
  Random random(22);
  for (DType dtype : {DType::f64, DType::f32}) {
    CAPTURE(name(dtype));
    Values lse_values = random.normals(rows, 3), part_values = random.normals(rows, 3);
    // In turns: as they are, both large, both low, one or both of none.
    for (int64_t i = 0; i < rows; ++i) {
      const double shift = i % 6 == 1 ? 1000 : i % 6 == 2 ? -1000 : 0;
      lse_values[i] = i % 6 == 3 || i % 6 == 5 ? -kInf : lse_values[i] + shift;
      part_values[i] = i % 6 == 4 || i % 6 == 5 ? -kInf : part_values[i] + shift;
    }
    const Tensor lse = Tensor::from_host(lse_values, {B, N, S}, dtype);
    const Tensor part_lse = Tensor::from_host(part_values, {B, N, S}, dtype);
    Values own = lse.items(), other = part_lse.items(), fused = random.normals(B * S * 7 * D);
    Values expected(B * S * N * D), expected_lse(rows, -kInf);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t b = i / (N * S), n = i / S % N, s = i % S;
      const double max = std::max(own[i], other[i]), shift = max == -kInf ? 0 : max;
      const double a = std::exp(own[i] - shift), c = std::exp(other[i] - shift);
      if (a + c > 0) expected_lse[i] = max + std::log(a + c);
      for (int64_t d = 0; d < D; ++d) {
        double& x = fused[((b * S + s) * 7 + n) * D + d];
        double& y = fused[((b * S + s) * 7 + N + n) * D + d];
        if (a == 0) x = 0;  // attention to no key
        if (c == 0) y = 0;
        if (a + c > 0) expected[((b * S + s) * N + n) * D + d] = (a * x + c * y) / (a + c);
      }
    }
    const Tensor both = Tensor::from_host(fused, {B, S, 7, D}, dtype), before = clone(both);
    const Tensor out = both.narrow(2, 0, N);
    ops::attention_merge(out, lse, both.narrow(2, N, N), part_lse);
    check_close(out, expected, tolerance_of(dtype), "out");
    check_close(lse, expected_lse, tolerance_of(dtype), "lse");
    REQUIRE(same_bits(both.narrow(2, N, 7 - N), before.narrow(2, N, 7 - N)));
  }
}

TEST_CASE("a part's probabilities become their share of the whole") {
  const OnDevice cpu;
  Random random(23);
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const DType acc = accumulate_dtype(dtype);
    const Tensor probs = random.tensor({2, 3, 4, 67}, dtype);
    Values of_part = random.normals(24, 2), of_all(24);
    for (size_t i = 0; i < 24; ++i) of_all[i] = of_part[i] + double(i) / 8;
    of_part[5] = of_part[7] = of_all[7] = -kInf;
    of_part[9] += 1000, of_all[9] += 1000;
    const Tensor part_lse = Tensor::from_host(of_part, {2, 3, 4}, acc);
    const Tensor lse = Tensor::from_host(of_all, {2, 3, 4}, acc);
    Values expected = probs.items();
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto row = static_cast<int64_t>(i / 67);
      expected[i] *= row == 5 || row == 7 ? 0 : std::exp(part_lse.item(row) - lse.item(row));
    }
    ops::attention_rescale(probs, part_lse, lse);
    check_close(probs, expected, tolerance_of(dtype));
  }
}

}  // namespace
}  // namespace usp::test
