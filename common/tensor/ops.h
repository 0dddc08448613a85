#pragma once

#include "tensor/backend.h"
#include "tensor/documents.h"

/// The operations of the book's model as pure functions: outputs first, written in place; inputs
/// untouched unless the same tensor is passed as output and the comment allows it. Each checks
/// shapes and dtypes, opens a trace span, counts floating-point operations, and calls the device's
/// kernel.
///
/// Dimensions: T tokens (rows), H hidden, F feed-forward width, V vocabulary (or this rank's
/// shard of it), B samples, S query positions, K key positions, N query heads, G kv heads, D
/// channels per head. "acc dtype": f32 for f32 and bf16 tensors, f64 for f64.
///
/// Sums over rows or elements run over fixed blocks in index order, so no result depends on the
/// number of threads, except through the matmul library (f32 and bf16). On a GPU, too, two runs
/// give the same bits. They are not the CPU's: sums there have blocks of their own, and a
/// multiplication and an addition are rounded once.
namespace usp::ops {

/// y = value everywhere.
void fill(Tensor y, double value);
/// y = x, converted to y's dtype; equal shapes, any strides.
void copy(Tensor y, const Tensor& x);
/// y = a + b; contiguous, equal shapes and dtypes; y may be a or b.
void add(Tensor y, const Tensor& a, const Tensor& b);
/// sum (acc dtype) += x, of the same shape
void accumulate(Tensor sum, const Tensor& x);

/// y = x / (1 - rate) where `random` draws at least `rate`, else 0: element (row, column) of x [T,
/// H] by the draw of index (first_row + row, column). y may be x. Srivastava et al. (2014),
/// https://jmlr.org/papers/v15/srivastava14a.html.
void dropout(Tensor y, const Tensor& x, double rate, const RandomStream& random, int64_t first_row);

/// c = a b, or c += a b; a [m, k], b [k, n], c [m, n], any strides with one axis of each
/// contiguous, c row-major. a and b share a dtype, c has it or its acc dtype. k = 0 gives zeros.
void matmul(Tensor c, const Tensor& a, const Tensor& b, bool accumulate = false);

/// The three matmuls of a linear layer, named in traces: y [T, O] = x [T, I] weightᵀ, weight [O,
/// I]; where there is a residual [T, O], y = residual + x weightᵀ. A device that fuses adds within
/// the product, "linear_forward_add" in traces, and rounds once; others add afterwards.
void linear_forward(Tensor y, const Tensor& x, const Tensor& weight, const Tensor& residual = {});
/// dx [T, I] = dy [T, O] weight
void linear_backward_input(Tensor dx, const Tensor& dy, const Tensor& weight);
/// dweight [O, I] (acc dtype, or x's) = or += dyᵀ x
void linear_backward_weight(Tensor dweight, const Tensor& dy, const Tensor& x, bool accumulate);

/// y [T, H]: row t = table row tokens[t] - vocab_offset, or zeros where the table [V, H], a shard
/// of the vocabulary that begins at vocab_offset, does not hold that token.
void embedding_forward(Tensor y, const Tensor& table, const Tensor& tokens,
                       int64_t vocab_offset = 0);
/// dtable [V, H] (acc dtype, or dy's) = or += the rows of dy [T, H] summed by token.
void embedding_backward(Tensor dtable, const Tensor& dy, const Tensor& tokens, int64_t vocab_offset,
                        bool accumulate);

/// y = x * rstd * weight, rstd [T] (acc dtype) = 1 / sqrt(mean(x²) + eps); x, y [T, H].
void rmsnorm_forward(Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps);
/// dx = dresidual + (gradient through the norm); dresidual [T, H] is the gradient that bypasses the
/// norm along the residual stream, or undefined where there is none. dx may be dy or dresidual.
void rmsnorm_backward_input(Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& weight,
                            const Tensor& rstd, const Tensor& dresidual);
/// dweight [H] (acc dtype, or x's) = or += the sum over rows of dy * x * rstd
void rmsnorm_backward_weight(Tensor dweight, const Tensor& dy, const Tensor& x, const Tensor& rstd,
                             bool accumulate);

/// Rotates x [B, S, N, D] (any strides, D contiguous) in place: channels c and c + D/2 of position
/// p by the angle whose cosine and sine are row p of cos and sin [.., D/2] (acc dtype). `inverse`
/// rotates back, which is also the gradient.
void rope(Tensor x, const Tensor& cos, const Tensor& sin, const Positions& positions, bool inverse);

/// y [T, F] = silu(gate) * up, gate_up [T, 2F] = gate columns, then up columns.
void swiglu_forward(Tensor y, const Tensor& gate_up);
/// dgate_up [T, 2F] from dy [T, F]; may overwrite gate_up.
void swiglu_backward(Tensor dgate_up, const Tensor& dy, const Tensor& gate_up);

/// Causal grouped-query attention. q [B, S, N, D], k and v [B, K, G, D] (any strides, D
/// contiguous), query head n reads kv head n / (N/G); a query sees the keys of its document at or
/// before its position. out [B, S, N, D] in q's dtype, or in its acc dtype to be merged with other
/// parts; lse [B, N, S] (acc dtype) = log of the sum of exp(scores). A query that sees no key gives
/// out 0 and lse -inf.
///
/// With `probs` [B, N, S, K] (dtype of q) defined, the probabilities are written there and backward
/// reads them (naive attention); undefined, backward recomputes them from lse, one block of rows at
/// a time (blockwise).
void attention_forward(Tensor out, Tensor lse, Tensor probs, const Tensor& q, const Tensor& k,
                       const Tensor& v, double scale, const Positions& queries,
                       const Positions& keys, const Documents& documents = {});
/// (out, lse), attention over some keys, becomes attention over those of (part_out, part_lse) too:
/// both outputs weighted by exp(their lse - the merged lse). out and part_out [B, S, N, D], lse and
/// part_lse [B, N, S], all in acc dtype, so that however many parts there are, out is rounded once,
/// by whoever copies it. A row that neither has seen keeps out 0 and lse -inf.
void attention_merge(Tensor out, Tensor lse, const Tensor& part_out, const Tensor& part_lse);
/// probs [B, N, S, K] *= exp(part_lse - lse): the probabilities of a part's keys become their share
/// of those of all keys. lse and part_lse [B, N, S] (acc dtype); a part_lse of -inf gives 0.
void attention_rescale(Tensor probs, const Tensor& part_lse, const Tensor& lse);
/// delta [B, N, S] (acc dtype) = sum over channels of dout * out.
void attention_delta(Tensor delta, const Tensor& dout, const Tensor& out);
/// A call that has all keys writes dq, dk, dv (shapes of q, k, v, any strides with D contiguous),
/// in q's dtype, rounded once, or in its acc dtype where something is still to be added.
/// To `accumulate`, one that has a part of them adds its share, in acc dtype; whoever has the sum
/// rounds it. `lse` and `delta` are those of the finished row, over all its keys.
void attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout, const Tensor& probs,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse,
                        const Tensor& delta, double scale, const Positions& queries,
                        const Positions& keys, bool accumulate, const Documents& documents = {});
/// Bytes that attention_backward() allocates for a while where it has probs [B, N, S, K]: for the
/// scores' gradient and, if query heads share the kv heads of dk [B, K, G, D] and that is in less
/// than acc dtype, for sums of dk and dv. Without probs the device's kernels say what they need,
/// and it counts as workspace.
int64_t naive_attention_workspace(const Tensor& probs, const Tensor& dk);

/// What a shard of the vocabulary contributes to the loss of each row. row_max [T] = max over its
/// logits [T, V], row_sum = sum of exp(logit - row_max), target_logit = the target's logit, 0 if
/// the target is in another shard; all in acc dtype.
void cross_entropy_forward(Tensor row_max, Tensor row_sum, Tensor target_logit,
                           const Tensor& logits, const Tensor& targets, int64_t vocab_offset = 0);
/// row_sum [T] *= exp(row_max - max): the sums of a shard refer to the largest logit of all shards
/// afterwards. All in acc dtype.
void cross_entropy_rescale(Tensor row_sum, const Tensor& row_max, const Tensor& max);
/// From the figures over the whole vocabulary: lse [T] = row_max + log(row_sum);
/// loss [1] (f64) += scale * sum over rows of (lse - target_logit).
void cross_entropy_loss(Tensor loss, Tensor lse, const Tensor& row_max, const Tensor& row_sum,
                        const Tensor& target_logit, double scale);
/// dlogits [T, V] = scale * (exp(logits - lse) - onehot(target)); may overwrite logits.
void cross_entropy_backward(Tensor dlogits, const Tensor& logits, const Tensor& targets,
                            const Tensor& lse, int64_t vocab_offset, double scale);

/// sum [1] (f64) = or += the sum of x² in f64, over fixed blocks in index order; x contiguous.
void sum_squares(Tensor sum, const Tensor& x, bool accumulate = false);
/// sum += the squares of all of these, of one dtype: one call on a device that fuses, on others one
/// for each.
void add_squares(const Tensor& sum, std::span<const Tensor> xs);
/// norm [1] (f64) = sqrt(sum of sums [n] (f64)); coefficient [1] (f64) = min(1, max_norm / norm),
/// or NaN if the norm is not finite, at which adamw() leaves everything as it is. max_norm = 0: no
/// clipping.
void clip_coefficient(Tensor coefficient, Tensor norm, const Tensor& sums, double max_norm);
/// One AdamW update of a flat range: m, v and master in acc dtype, grad too or in the weights',
/// value in the weights' dtype (the rounded master; where the weights are in acc dtype, pass the
/// same tensor as value and master). Loshchilov & Hutter (2019), https://arxiv.org/abs/1711.05101.
/// The gradient is multiplied by coefficient [1] (f64) first.
void adamw(Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& grad,
           const Tensor& coefficient, const AdamWSettings& settings);
/// The same of several ranges at once, all of the same dtypes, each with its weight decay: to the
/// bit what one call for each leaves, in one loop over all of their elements, or in one launch of a
/// kernel for up to 32 of them.
void adamw(std::span<const AdamWRange> ranges, const Tensor& coefficient,
           const AdamWSettings& settings);

}  // namespace usp::ops
