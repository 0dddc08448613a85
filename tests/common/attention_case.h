#pragma once

#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {

/// One attention problem: q, k and v are slices of fused tensors, as after one projection, and so
/// are their gradients; the heads around them must stay as they are.
struct AttentionCase {
  int64_t B, N, G, D;
  Positions queries, keys;
  std::vector<int32_t> begins{};  ///< [B, S] of documents, or none

  int64_t S() const { return queries.count(); }
  int64_t K() const { return keys.count(); }
  Shape q_shape() const { return {B, S(), N, D}; }
  Shape k_shape() const { return {B, K(), G, D}; }
  Shape lse_shape() const { return {B, N, S()}; }
  Shape probs_shape() const { return {B, N, S(), K()}; }
};

/// The same case where in sample b documents begin at the positions starts[b], besides at 0.
inline AttentionCase with_documents(AttentionCase c,
                                    const std::vector<std::vector<int32_t>>& starts) {
  for (int64_t i = 0; i < c.B * c.S(); ++i) {
    int32_t begin = 0;
    for (int32_t start : starts[i / c.S()]) {
      if (start <= c.queries[i % c.S()]) begin = std::max(begin, start);
    }
    c.begins.push_back(begin);
  }
  return c;
}

/// What may happen to attention: one kv head for each query head, for several, for all; sizes on
/// both sides of every block; two position ranges; queries before, after and among the keys;
/// documents.
inline std::vector<AttentionCase> attention_cases() {
  return {
      {2, 3, 3, 8, {0, 7}, {0, 7}},
      {2, 4, 2, 5, {0, 13}, {0, 13}},
      {1, 6, 1, 2, {0, 17}, {0, 17}},
      {1, 2, 1, 20, {0, 101}, {0, 101}},
      {1, 1, 1, 3, {0, 200}, {0, 200}},
      // One more than a tile: 32 keys on a GPU, 96 on a CPU. The last query sees one key of the
      // last.
      {1, 1, 1, 3, {0, 33}, {0, 33}},
      {1, 1, 1, 3, {0, 97}, {0, 97}},
      {1, 2, 1, 37, {0, 70}, {0, 70}},
      {1, 2, 2, 6, {4, 5, 20, 7}, {0, 4, 16, 4}},
      {2, 2, 1, 4, {0, 50, 150, 49}, {0, 50, 150, 49}},
      {1, 2, 1, 4, {0, 6}, {3, 9}},      // the first queries see no key
      {1, 2, 1, 4, {0, 6}, {6, 5}},      // nobody sees anything
      {1, 2, 1, 4, {30, 6}, {0, 25}},    // everybody sees everything
      {1, 2, 1, 4, {120, 1}, {0, 121}},  // one new token
      // Documents of one token, at both ends too; a sample that is one.
      with_documents({2, 4, 2, 5, {0, 13}, {0, 13}}, {{1, 2, 12}, {}}),
      // On the bounds of tiles, and next to them; over several.
      with_documents({2, 2, 1, 20, {0, 200}, {0, 200}}, {{96, 192}, {95, 97, 191}}),
      with_documents({1, 2, 1, 4, {0, 300}, {0, 300}}, {{5, 290}}),
      // In the gap between two ranges, at its ends, and within each.
      with_documents({2, 2, 1, 4, {0, 50, 150, 49}, {0, 50, 150, 49}}, {{25, 50, 160}, {100, 150}}),
      with_documents({1, 2, 2, 6, {4, 5, 20, 7}, {0, 4, 16, 4}}, {{2, 19, 22}}),  // no key from 22
      with_documents({1, 2, 1, 4, {120, 1}, {0, 121}}, {{100}}),
  };
}

/// Inputs, and what the forward pass makes of them.
class AttentionRun {
 public:
  AttentionRun(const AttentionCase& c, DType dtype, bool naive, uint64_t seed)
      : c(c),
        naive(naive),
        scale(1 / std::sqrt(double(c.D))),
        documents(c.begins.empty() ? Documents() : Documents(c.begins, {c.B, c.S()})),
        fused_q_(Random(seed).tensor({c.B, c.S(), c.N + 2, c.D}, dtype)),
        fused_kv_(Random(seed + 1).tensor({c.B, c.K(), 2 * c.G + 1, c.D}, dtype)),
        q(fused_q_.narrow(2, 1, c.N)),
        k(fused_kv_.narrow(2, 0, c.G)),
        v(fused_kv_.narrow(2, c.G, c.G)),
        dout(Random(seed + 2).tensor(c.q_shape(), dtype)),
        out(Tensor::empty(c.q_shape(), dtype)),
        lse(Tensor::empty(c.lse_shape(), accumulate_dtype(dtype))),
        delta(Tensor::empty(c.lse_shape(), accumulate_dtype(dtype))) {
    if (naive) probs = Tensor::empty(c.probs_shape(), dtype);
    forward();
  }

  void forward() {
    ops::attention_forward(out, lse, probs, q, k, v, scale, c.queries, c.keys, documents);
  }

  /// Adds the gradients to `gradients` [B, S, N, D], [B, K, G, D], [B, K, G, D], or writes them.
  struct Gradients {
    Tensor dq, dk, dv;
  };
  void backward(const Gradients& gradients, bool accumulate = true) {
    ops::attention_delta(delta, dout, out);
    ops::attention_backward(gradients.dq, gradients.dk, gradients.dv, dout, probs, q, k, v, lse,
                            delta, scale, c.queries, c.keys, accumulate, documents);
  }
  /// In this dtype, written over NaN.
  Gradients backward(DType dtype) {
    const Gradients gradients{Tensor::empty(c.q_shape(), dtype), Tensor::empty(c.k_shape(), dtype),
                              Tensor::empty(c.k_shape(), dtype)};
    for (const Tensor& x : {gradients.dq, gradients.dk, gradients.dv}) ops::fill(x, kNaN);
    backward(gradients, /*accumulate=*/false);
    return gradients;
  }
  Gradients backward() { return backward(accumulate_dtype(q.dtype())); }

  AttentionCase c;
  bool naive;
  double scale;
  Documents documents;

 private:
  Tensor fused_q_, fused_kv_;

 public:
  Tensor q, k, v, dout, out, lse, delta, probs;
};

/// Gradients written over NaN are those added to zeros; in the dtype of q they are these, rounded.
inline void check_rounded_once(AttentionRun& run) {
  const DType dtype = run.q.dtype(), acc = accumulate_dtype(dtype);
  const AttentionRun::Gradients sums{Tensor::zeros(run.c.q_shape(), acc),
                                     Tensor::zeros(run.c.k_shape(), acc),
                                     Tensor::zeros(run.c.k_shape(), acc)};
  run.backward(sums);
  const auto whole = run.backward(), own = run.backward(dtype);
  for (const auto gradient :
       {&AttentionRun::Gradients::dq, &AttentionRun::Gradients::dk, &AttentionRun::Gradients::dv}) {
    CAPTURE((sums.*gradient).shape().to_string());
    const Tensor rounded = Tensor::empty((sums.*gradient).shape(), dtype);
    ops::copy(rounded, sums.*gradient);
    const bool is_written = (whole.*gradient).items() == (sums.*gradient).items();
    REQUIRE(is_written);
    const bool is_rounded_once = (own.*gradient).items() == rounded.items();
    REQUIRE(is_rounded_once);
  }
}

/// `run` under every case, naive and blockwise.
template <class Run>
void for_each_attention(const Run& run) {
  for (const AttentionCase& c : attention_cases()) {
    for (bool naive : {true, false}) {
      CAPTURE(c.B, c.N, c.G, c.D, c.S(), c.K(), c.queries[0], c.keys[0], c.begins.size(), naive);
      run(c, naive);
    }
  }
}

}  // namespace usp::test
