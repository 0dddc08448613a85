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

}  // namespace

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

void Backend::naive_attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout,
                                       const Tensor& probs, const Tensor& q, const Tensor& k,
                                       const Tensor& v, const Tensor& delta, double scale) {
  const int64_t group = q.size(2) / k.size(2);
  Tensor dscores = Tensor::empty(probs.shape(), probs.dtype());  // [B, N, S, K]
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t n = 0; n < q.size(2); ++n) {
      matmul(matrix_of(dscores, b, n), head_of(dout, b, n), head_of(v, b, n / group).transposed(),
             false);  // gradient of the probabilities
      matmul(head_of(dv, b, n / group), matrix_of(probs, b, n).transposed(), head_of(dout, b, n),
             /*accumulate=*/true);
    }
  }
  causal_softmax_backward(dscores, dscores, probs, delta, scale);
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t n = 0; n < q.size(2); ++n) {
      matmul(head_of(dq, b, n), matrix_of(dscores, b, n), head_of(k, b, n / group), true);
      matmul(head_of(dk, b, n / group), matrix_of(dscores, b, n).transposed(), head_of(q, b, n),
             true);
    }
  }
}

}  // namespace usp
