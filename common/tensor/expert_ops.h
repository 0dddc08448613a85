#pragma once

#include <span>

#include "tensor/tensor.h"

/// The operations of a mixture of experts: which experts a token is sent to, the rows on their way,
/// the matrix products of many experts at once, and the losses that balance them. As in ops.h:
/// outputs first, shapes and dtypes checked, any number of rows including none.
///
/// Dimensions: T tokens, H hidden, E experts, k choices of a token, R rows on their way to experts.
/// A choice of -1 is none: its token was dropped there. `runs`: consecutive stretches of T / runs
/// tokens, such as the samples of a micro-batch.
namespace usp {

/// How a router's logits become scores of the experts.
enum class RouterScore {
  softmax,  ///< they add up to 1. Shazeer et al. (2017), https://arxiv.org/abs/1701.06538
  sigmoid,  ///< each for itself. DeepSeek-AI (2024), https://arxiv.org/abs/2412.19437
};

}  // namespace usp

namespace usp::ops {

/// scores [T, E] = softmax of each row, or sigmoid of each number, of logits [T, E]; both acc
/// dtype.
void router_scores(Tensor scores, const Tensor& logits, RouterScore kind);
/// dlogits [T, E] from dscores [T, E], all acc dtype; dlogits may be dscores.
void router_scores_backward(Tensor dlogits, const Tensor& dscores, const Tensor& scores,
                            RouterScore kind);

/// choices [T, k] i32 = for each token the k experts of the highest scores + bias [E] (undefined:
/// 0), the highest first; of equals the lower number. With `groups` > 1, experts lie in this many
/// groups of E / groups in a row, and a token chooses within its `allowed` best ones: those of the
/// highest sum over their best ceil(k / allowed) experts; of equals the lower number.
/// DeepSeek-AI (2024), section 2.1.2: a group is a node. bias is in the scores' dtype; NaN counts
/// as -infinity, so that a token's k always differ.
void choose_experts(Tensor choices, const Tensor& scores, const Tensor& bias, int64_t groups = 1,
                    int64_t allowed = 1);
/// counts [runs, E] i32 = how many choices of each run's tokens fell on each expert.
void count_choices(Tensor counts, const Tensor& choices);
/// Drops what an expert has no room for: a choice [T, k] becomes -1 where `capacity` choices of the
/// same sample have fallen on the expert before it, by token and then by choice. Of these, before
/// [runs, E] i32 lie ahead of the run; the others are counted here. A -1 fell on no expert.
void drop_choices(Tensor choices, const Tensor& before, int64_t capacity);

/// gates [T, k] (acc dtype) = scale * scores at choices; `normalised`: over the sum of a token's k
/// first, and 0 where that sum is 0. The choices are those before any was dropped, none of them -1:
/// gates depend on nothing but the scores.
void gates_forward(Tensor gates, const Tensor& scores, const Tensor& choices, bool normalised,
                   double scale);
/// dscores [T, E] (acc dtype) += the gradient; gates as gates_forward made them.
void gates_backward(Tensor dscores, const Tensor& dgates, const Tensor& gates, const Tensor& scores,
                    const Tensor& choices, bool normalised, double scale);

/// slots [T, k] i32: the row of each choice when rows are sorted by expert, then by token, then by
/// choice; -1 where the choice is. counts [E]: choices that fell on each expert.
void assign_slots(Tensor slots, const Tensor& choices, std::span<const int64_t> counts);
/// rows [R, H]: row slots[t, j] = x[t]; x [T, H]. Every row is one of the slots.
void permute(Tensor rows, const Tensor& x, const Tensor& slots);
/// y [T, H] = the sum over j of gates[t, j] * row slots[t, j]; gates undefined: 1; slots of -1 add
/// nothing. Sums in acc dtype in the order of j; `accumulate`: y is the first term.
void unpermute(Tensor y, const Tensor& rows, const Tensor& slots, const Tensor& gates,
               bool accumulate = false);
/// y = residual [T, H] + that sum. A device that fuses begins the sum with the residual,
/// "unpermute_add" in traces, and rounds once; others add afterwards, so y is not the residual.
void unpermute_onto(Tensor y, const Tensor& residual, const Tensor& rows, const Tensor& slots,
                    const Tensor& gates);
/// drows [R, H] (may be rows) and dgates [T, k] (acc dtype; 0 where the slot is -1) from dy [T, H].
/// Without gates the gradient is permute(drows, dy, slots), as permute's is unpermute without
/// gates.
void unpermute_backward(Tensor drows, Tensor dgates, const Tensor& dy, const Tensor& rows,
                        const Tensor& slots, const Tensor& gates);

/// The linear layers of several experts: rows [R, I] lie sorted by expert, counts[e] of them for
/// expert e, and weights [E, O, I] is a matrix each. y [R, O]: rows of expert e times weights[e]ᵀ.
void grouped_linear_forward(Tensor y, const Tensor& x, const Tensor& weights,
                            std::span<const int64_t> counts);
/// dx [R, I] = rows of dy [R, O] times their expert's matrix.
void grouped_linear_backward_input(Tensor dx, const Tensor& dy, const Tensor& weights,
                                   std::span<const int64_t> counts);
/// dweights [E, O, I] (acc dtype, or x's) = or += dyᵀ x of each expert's rows; zeros for an expert
/// without rows.
void grouped_linear_backward_weight(Tensor dweights, const Tensor& dy, const Tensor& x,
                                    std::span<const int64_t> counts, bool accumulate);

/// loss [1] (f64) += scale * the sum over tokens t and experts e of load[run of t, e] * p[t, e];
/// scores [T, E], load [runs, E] in acc dtype. p are the scores, over their sum of each token where
/// `normalised`.
void balance_loss_forward(Tensor loss, const Tensor& scores, const Tensor& load, double scale,
                          bool normalised);
/// dscores [T, E] (acc dtype) += the gradient.
void balance_loss_backward(Tensor dscores, const Tensor& scores, const Tensor& load, double scale,
                           bool normalised);
/// loss [1] (f64) += scale * the sum over tokens of log(sum of exp(logits))²; logits [T, E] in acc
/// dtype. Zoph et al. (2022), https://arxiv.org/abs/2202.08906.
void z_loss_forward(Tensor loss, const Tensor& logits, double scale);
/// dlogits [T, E] (acc dtype) += the gradient.
void z_loss_backward(Tensor dlogits, const Tensor& logits, double scale);
/// sum [1] (f64) += over tokens, the entropy of p in nats, p the scores over their sum of a token.
void router_entropy(Tensor sum, const Tensor& scores);
/// bias [E] (acc dtype) += rate where load [E] (acc dtype) lies below its mean, -= rate where
/// above. Wang et al. (2024), https://arxiv.org/abs/2408.15664.
void balance_bias(Tensor bias, const Tensor& load, double rate);

}  // namespace usp::ops
