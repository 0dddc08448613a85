#include "tensor/backend.h"

namespace usp {

namespace {

/// The [rows, channels] matrix of one head of one sample of x [B, S, N, D].
Tensor head_of(const Tensor& x, int64_t sample, int64_t head) {
  return x.narrow(0, sample, 1).narrow(2, head, 1).view({x.size(1), x.size(3)});
}

/// The [S, K] matrix of one head of one sample of x [B, N, S, K].
Tensor matrix_of(const Tensor& x, int64_t sample, int64_t head) {
  return x.narrow(0, sample, 1).narrow(1, head, 1).view({x.size(2), x.size(3)});
}

/// The matrix [O, I] of one expert of x [E, O, I].
Tensor expert_of(const Tensor& x, int64_t expert) {
  return x.narrow(0, expert, 1).view({x.size(1), x.size(2)});
}

/// body(expert, first row, number of rows) for each expert, whose rows lie one after the other.
template <class Body>
void for_each_expert(std::span<const int64_t> counts, const Body& body) {
  int64_t begin = 0;
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    body(static_cast<int64_t>(expert), begin, counts[expert]);
    begin += counts[expert];
  }
}

/// product(expert, first row, number of rows) for each expert that has any, in whole units. What
/// this puts into rows of the experts behind it, their own products overwrite.
template <class Product>
void for_whole_units(const Backend& backend, std::span<const int64_t> counts, int64_t rows,
                     const Product& product) {
  for_each_expert(counts, [&](int64_t expert, int64_t begin, int64_t count) {
    const int64_t unit = backend.unit_of_rows(count);
    const int64_t whole = (count + unit - 1) / unit * unit;
    if (count > 0) product(expert, begin, std::min(whole, rows - begin));
  });
}

}  // namespace

void Backend::matmul_add(Tensor c, const Tensor& a, const Tensor& b, const Tensor& addend) {
  copy(c, addend);
  matmul(c, a, b, /*accumulate=*/true);
}

void Backend::naive_attention_forward(Tensor out, Tensor lse, Tensor probs, const Tensor& q,
                                      const Tensor& k, const Tensor& v, double scale,
                                      const Positions& queries, const Positions& keys,
                                      const Tensor& begins) {
  const int64_t group = q.size(2) / k.size(2);
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t n = 0; n < q.size(2); ++n) {
      matmul(matrix_of(probs, b, n), head_of(q, b, n), head_of(k, b, n / group).transposed(),
             /*accumulate=*/false);  // scores, soon overwritten by probabilities
    }
  }
  causal_softmax_forward(probs, lse, probs, scale, queries, keys, begins);
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t n = 0; n < q.size(2); ++n) {
      matmul(head_of(out, b, n), matrix_of(probs, b, n), head_of(v, b, n / group), false);
    }
  }
}

// Differentiates naive_attention_forward's `matmul(head_of(out, b, n), matrix_of(probs, b, n),
// head_of(v, b, n / group), false)`, and with the gradient of the softmax between them
// `matmul(matrix_of(probs, b, n), head_of(q, b, n), head_of(k, b, n / group).transposed(),
// /*accumulate=*/false)`.
void Backend::naive_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dscores,
                                       const Tensor& dout, const Tensor& probs, const Tensor& q,
                                       const Tensor& k, const Tensor& v, const Tensor& delta,
                                       double scale, bool accumulate) {
  const int64_t group = q.size(2) / k.size(2);
  // The first head of a group finds no other one's gradient of its keys.
  const auto adds = [=](int64_t n) { return accumulate || n % group > 0; };
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t n = 0; n < q.size(2); ++n) {
      matmul(matrix_of(dscores, b, n), head_of(dout, b, n), head_of(v, b, n / group).transposed(),
             false);  // gradient of the probabilities
      matmul(head_of(dv, b, n / group), matrix_of(probs, b, n).transposed(), head_of(dout, b, n),
             adds(n));
    }
  }
  causal_softmax_backward(dscores, dscores, probs, delta, scale);
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t n = 0; n < q.size(2); ++n) {
      matmul(head_of(dq, b, n), matrix_of(dscores, b, n), head_of(k, b, n / group), accumulate);
      matmul(head_of(dk, b, n / group), matrix_of(dscores, b, n).transposed(), head_of(q, b, n),
             adds(n));
    }
  }
}

void Backend::grouped_linear_forward(Tensor y, const Tensor& x, const Tensor& weights,
                                     std::span<const int64_t> counts) {
  for_whole_units(*this, counts, x.size(0), [&](int64_t expert, int64_t begin, int64_t rows) {
    matmul(y.narrow(0, begin, rows), x.narrow(0, begin, rows),
           expert_of(weights, expert).transposed(), /*accumulate=*/false);
  });
}

// Differentiates grouped_linear_forward's `matmul(y.narrow(0, begin, rows), x.narrow(0, begin,
// rows), expert_of(weights, expert).transposed(), /*accumulate=*/false)` by x.
void Backend::grouped_linear_backward_input(Tensor dx, const Tensor& dy, const Tensor& weights,
                                            std::span<const int64_t> counts) {
  for_whole_units(*this, counts, dy.size(0), [&](int64_t expert, int64_t begin, int64_t rows) {
    matmul(dx.narrow(0, begin, rows), dy.narrow(0, begin, rows), expert_of(weights, expert),
           /*accumulate=*/false);
  });
}

// Differentiates grouped_linear_forward's `matmul(y.narrow(0, begin, rows), x.narrow(0, begin,
// rows), expert_of(weights, expert).transposed(), /*accumulate=*/false)` by weights.
void Backend::grouped_linear_backward_weight(Tensor dweights, const Tensor& dy, const Tensor& x,
                                             std::span<const int64_t> counts, bool accumulate) {
  for_each_expert(counts, [&](int64_t expert, int64_t begin, int64_t count) {
    const Tensor dweight = expert_of(dweights, expert);
    if (count == 0) {  // an idle expert: not the gradient of an earlier pass
      if (!accumulate) fill(dweight, 0);
      return;
    }
    // In a narrower dtype the sums of two products would be rounded twice.
    const bool exact = dweights.dtype() == accumulate_dtype(x.dtype());
    const int64_t rest = exact ? count % unit_of_rows(count) : 0;
    const auto sum_rows = [&](int64_t first, int64_t rows, bool add) {
      matmul(dweight, dy.narrow(0, first, rows).transposed(), x.narrow(0, first, rows), add);
    };
    sum_rows(begin, count - rest, accumulate);
    if (rest > 0) sum_rows(begin + count - rest, rest, /*add=*/true);
  });
}

}  // namespace usp
