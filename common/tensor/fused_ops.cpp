#include "tensor/fused_ops.h"

#include <algorithm>

#include "tensor/op_scope.h"
#include "tensor/ops.h"

namespace usp::ops {

namespace {

/// use(begin, count) for rows [begin, begin + count) of T, this many at once. Where there is no
/// row, one chunk of none: it writes the weight's gradient too.
template <class Use>
void each_chunk(int64_t T, int64_t rows, const Use& use) {
  USP_CHECK(rows > 0, "linear_cross_entropy: {} rows at once", rows);
  int64_t begin = 0;
  do {
    use(begin, std::min(rows, T - begin));
    begin += rows;
  } while (begin < T);
}

/// Each has as many rows as x; chunks of them are checked further by the operations that take them.
void check_rows(const Tensor& x, std::initializer_list<const Tensor*> all) {
  for (const Tensor* each : all) {
    USP_CHECK(each->size(0) == x.size(0), "linear_cross_entropy: {} rows beside {} of x",
              each->size(0), x.size(0));
  }
}

/// The logits of these rows again, their gradient in the same memory, and that of x.
void gradients_of_rows(Tensor dx, Tensor dlogits, const Tensor& x, const Tensor& weight,
                       const Tensor& targets, const Tensor& lse, int64_t vocab_offset,
                       double scale) {
  {
    const RecomputeScope again;
    linear_forward(dlogits, x, weight);
  }
  cross_entropy_backward(dlogits, dlogits, targets, lse, vocab_offset, scale);
  linear_backward_input(dx, dlogits, weight);
}

}  // namespace

Tensor swiglu_again(const Tensor& gate_up) {
  const Tensor product = Tensor::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.dtype());
  swiglu_forward(product, gate_up);
  return product;
}

// [forward]
void linear_cross_entropy_forward(Tensor row_max, Tensor row_sum, Tensor target_logit,
                                  const Tensor& x, const Tensor& weight, const Tensor& targets,
                                  int64_t vocab_offset, int64_t rows) {
  check_rows(x, {&row_max, &row_sum, &target_logit, &targets});
  const TraceScope trace("linear_cross_entropy");
  each_chunk(x.size(0), rows, [&](int64_t begin, int64_t count) {
    const auto part = [&](const Tensor& of) { return of.narrow(0, begin, count); };
    const Tensor logits = Tensor::empty({count, weight.size(0)}, x.dtype());
    linear_forward(logits, part(x), weight);
    cross_entropy_forward(part(row_max), part(row_sum), part(target_logit), logits, part(targets),
                          vocab_offset);
  });
}
// [forward]

// [backward]
void linear_cross_entropy_backward(Tensor dx, Tensor dweight, const Tensor& x, const Tensor& weight,
                                   const Tensor& targets, const Tensor& lse, int64_t vocab_offset,
                                   double scale, int64_t rows, bool accumulate) {
  check_rows(x, {&dx, &targets, &lse});
  const TraceScope trace("linear_cross_entropy");
  each_chunk(x.size(0), rows, [&](int64_t begin, int64_t count) {
    const auto part = [&](const Tensor& of) { return of.narrow(0, begin, count); };
    const Tensor dlogits = Tensor::empty({count, weight.size(0)}, x.dtype());
    gradients_of_rows(part(dx), dlogits, part(x), weight, part(targets), part(lse), vocab_offset,
                      scale);
    linear_backward_weight(dweight, dlogits, part(x), accumulate || begin > 0);
  });
}
// [backward]

void linear_cross_entropy_backward_input(Tensor dx, Tensor dlogits, const Tensor& x,
                                         const Tensor& weight, const Tensor& targets,
                                         const Tensor& lse, int64_t vocab_offset, double scale) {
  const TraceScope trace("linear_cross_entropy");
  gradients_of_rows(dx, dlogits, x, weight, targets, lse, vocab_offset, scale);
}

}  // namespace usp::ops
