#pragma once

#include "tensor/tensor.h"

/// Operations that are one to their caller, so that what lies between their parts is never in
/// memory as a whole. On every device they are made of operations of ops.h, under whose names a
/// trace shows the parts inside a span of this one. As in ops.h: outputs first, shapes and dtypes
/// checked, any number of rows including none.
namespace usp::ops {

/// SwiGLU's product [T, F], made again by whoever has kept gate_up [T, 2F] and not the product.
Tensor swiglu_again(const Tensor& gate_up);

/// cross_entropy_forward() of the logits [T, V] = x [T, H] weightᵀ, weight [V, H] being the shard
/// of the vocabulary that begins at vocab_offset; `rows` of the logits are there at once.
void linear_cross_entropy_forward(Tensor row_max, Tensor row_sum, Tensor target_logit,
                                  const Tensor& x, const Tensor& weight, const Tensor& targets,
                                  int64_t vocab_offset, int64_t rows);
/// dx [T, H] and dweight [V, H] (acc dtype, or x's) = or += the gradients of scale * sum over rows
/// of (lse - logit of the target), from `rows` of the logits at once, which are multiplied again.
/// lse [T] (acc dtype) is that of the whole vocabulary, dx what this shard adds to its gradient.
void linear_cross_entropy_backward(Tensor dx, Tensor dweight, const Tensor& x, const Tensor& weight,
                                   const Tensor& targets, const Tensor& lse, int64_t vocab_offset,
                                   double scale, int64_t rows, bool accumulate);
/// dx alone, and dlogits [T, V] as a whole: whoever puts dweight off makes it of them later, by
/// linear_backward_weight().
void linear_cross_entropy_backward_input(Tensor dx, Tensor dlogits, const Tensor& x,
                                         const Tensor& weight, const Tensor& targets,
                                         const Tensor& lse, int64_t vocab_offset, double scale);

}  // namespace usp::ops
