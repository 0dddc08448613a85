#include "tensor/expert_ops.h"

#include "tensor/op_scope.h"
#include "tensor/ops.h"

namespace usp::ops {

namespace {

/// `tensor` holds what routers compute with.
void check_router_dtype(const Tensor& tensor, std::string_view what) {
  USP_CHECK(tensor.dtype() == DType::f32 || tensor.dtype() == DType::f64,
            "{} holds {}, expected f32 or f64", what, name(tensor.dtype()));
}

/// `tensor` is a matrix [T, E] of it.
void check_scores(const Tensor& tensor, std::string_view what) {
  USP_CHECK(tensor.defined() && tensor.rank() == 2, "{} has shape {}, expected [tokens, experts]",
            what, tensor.shape().to_string());
  check_router_dtype(tensor, what);
  USP_CHECK(tensor.contiguous(), "{} must be contiguous", what);
}

/// `tensor` has a row of i32 for each of `tokens` tokens: a number per choice.
void check_choices(const Tensor& tensor, int64_t tokens, std::string_view what) {
  USP_CHECK(tensor.defined() && tensor.rank() == 2, "{} has shape {}, expected [tokens, choices]",
            what, tensor.shape().to_string());
  check_operand(tensor, {tokens, tensor.size(1)}, DType::i32, what);
}

/// `tensor` has a row for each of the runs, into which this many tokens are cut.
void check_runs(const Tensor& tensor, int64_t tokens, std::string_view what) {
  USP_CHECK(tensor.defined() && tensor.rank() == 2, "{} has shape {}, expected [runs, experts]",
            what, tensor.shape().to_string());
  USP_CHECK(tensor.size(0) > 0 && tokens % tensor.size(0) == 0,
            "{}: {} tokens cannot be cut into {} runs of the same length; try 1", what, tokens,
            tensor.size(0));
}

/// Rows `x` [R, H] on their way, of T tokens `tokens` [T, H]: matrices of one dtype and width.
void check_rows(const Tensor& x, const Tensor& tokens, std::string_view what) {
  USP_CHECK(x.defined() && x.rank() == 2 && tokens.defined() && tokens.rank() == 2,
            "{}: rows {} and tokens {} must be matrices", what, x.shape().to_string(),
            tokens.shape().to_string());
  check_operand(tokens, tokens.shape(), tokens.dtype(), what);
  check_operand(x, {x.size(0), tokens.size(1)}, tokens.dtype(), what);
}

/// y [T, H] of rows [R, H], slots [T, k] and gates [T, k], which may be undefined.
void check_unpermute(const Tensor& y, const Tensor& rows, const Tensor& slots,
                     const Tensor& gates) {
  check_rows(rows, y, "unpermute");
  check_choices(slots, y.size(0), "unpermute: slots");
  if (!gates.defined()) return;
  check_operand(gates, slots.shape(), accumulate_dtype(y.dtype()), "unpermute: gates");
}

/// `counts` tells of each expert of `weights` [E, O, I] how many of `rows` rows are its own.
void check_counts(std::span<const int64_t> counts, const Tensor& weights, int64_t rows,
                  std::string_view what) {
  USP_CHECK(weights.defined() && weights.rank() == 3, "{} of weights {}, expected [experts, O, I]",
            what, weights.shape().to_string());
  const auto experts = static_cast<int64_t>(counts.size());
  USP_CHECK(experts == weights.size(0), "{}: {} counts of rows for {} experts", what, experts,
            weights.size(0));
  int64_t sum = 0;
  for (int64_t count : counts) {
    USP_CHECK(count >= 0, "{}: an expert with {} rows", what, count);
    sum += count;
  }
  USP_CHECK(sum == rows, "{}: the experts' counts add up to {} and there are {} rows", what, sum,
            rows);
}

/// Checks x [R, I], y [R, O] and weights [E, O, I]; returns the operations of a product of these.
int64_t check_grouped(const Tensor& y, const Tensor& x, const Tensor& weights,
                      std::span<const int64_t> counts, std::string_view what) {
  USP_CHECK(x.defined() && x.rank() == 2, "{}: the rows have shape {}, expected [rows, I]", what,
            x.shape().to_string());
  check_counts(counts, weights, x.size(0), what);
  const int64_t R = x.size(0), O = weights.size(1), I = weights.size(2);
  check_operand(x, {R, I}, x.dtype(), what);
  check_operand(y, {R, O}, x.dtype(), what);
  return 2 * R * I * O;
}

}  // namespace

void router_scores(Tensor scores, const Tensor& logits, RouterScore kind) {
  check_scores(logits, "router_scores: logits");
  check_operand(scores, logits.shape(), logits.dtype(), "router_scores: scores");
  OpScope("router_scores", 0, scores, logits)->router_scores(scores, logits, kind);
}

void router_scores_backward(Tensor dlogits, const Tensor& dscores, const Tensor& scores,
                            RouterScore kind) {
  check_scores(scores, "router_scores_backward: scores");
  check_operand(dscores, scores.shape(), scores.dtype(), "router_scores_backward: dscores");
  check_operand(dlogits, scores.shape(), scores.dtype(), "router_scores_backward: dlogits");
  OpScope("router_scores_backward", 0, dlogits, dscores, scores)
      ->router_scores_backward(dlogits, dscores, scores, kind);
}

void choose_experts(Tensor choices, const Tensor& scores, const Tensor& bias, int64_t groups,
                    int64_t allowed) {
  check_scores(scores, "choose_experts: scores");
  check_choices(choices, scores.size(0), "choose_experts: choices");
  const int64_t E = scores.size(1), k = choices.size(1);
  if (bias.defined()) check_operand(bias, {E}, scores.dtype(), "choose_experts: bias");
  USP_CHECK(groups >= 1 && E % groups == 0, "{} groups must divide {} experts; try {}", groups, E,
            list_divisors(E, E));
  USP_CHECK(allowed >= 1 && allowed <= groups,
            "a token may choose within {} of {} groups; try a number from 1 to {}", allowed, groups,
            groups);
  USP_CHECK(k >= 1 && k <= E / groups * allowed,
            "{} choices of {} experts in {} of {} groups; try a number from 1 to {}", k, E, allowed,
            groups, E / groups * allowed);
  OpScope("choose_experts", 0, choices, scores, Uncounted{bias})
      ->choose_experts(choices, scores, bias, groups, allowed);
}

void count_choices(Tensor counts, const Tensor& choices) {
  check_choices(choices, choices.size(0), "count_choices: choices");
  check_runs(counts, choices.size(0), "count_choices: counts");
  check_operand(counts, counts.shape(), DType::i32, "count_choices: counts");
  OpScope("count_choices", 0, counts, choices)->count_choices(counts, choices);
}

void drop_choices(Tensor choices, const Tensor& before, int64_t capacity) {
  check_choices(choices, choices.size(0), "drop_choices: choices");
  check_runs(before, choices.size(0), "drop_choices: before");
  check_operand(before, before.shape(), DType::i32, "drop_choices: before");
  USP_CHECK(capacity >= 0, "an expert has room for {} choices of a sample; try 1", capacity);
  OpScope("drop_choices", 0, choices, choices, before)->drop_choices(choices, before, capacity);
}

void gates_forward(Tensor gates, const Tensor& scores, const Tensor& choices, bool normalised,
                   double scale) {
  check_scores(scores, "gates_forward: scores");
  check_choices(choices, scores.size(0), "gates_forward: choices");
  check_operand(gates, choices.shape(), scores.dtype(), "gates_forward: gates");
  OpScope("gates_forward", 0, gates, Uncounted{scores}, choices)
      ->gates_forward(gates, scores, choices, normalised, scale);
}

void gates_backward(Tensor dscores, const Tensor& dgates, const Tensor& gates, const Tensor& scores,
                    const Tensor& choices, bool normalised, double scale) {
  check_scores(scores, "gates_backward: scores");
  check_operand(dscores, scores.shape(), scores.dtype(), "gates_backward: dscores");
  check_choices(choices, scores.size(0), "gates_backward: choices");
  check_operand(gates, choices.shape(), scores.dtype(), "gates_backward: gates");
  check_operand(dgates, choices.shape(), scores.dtype(), "gates_backward: dgates");
  OpScope("gates_backward", 0, Uncounted{dscores}, dgates, gates, Uncounted{scores}, choices)
      ->gates_backward(dscores, dgates, gates, scores, choices, normalised, scale);
}

void assign_slots(Tensor slots, const Tensor& choices, std::span<const int64_t> counts) {
  check_choices(choices, choices.size(0), "assign_slots: choices");
  check_operand(slots, choices.shape(), DType::i32, "assign_slots: slots");
  int64_t sum = 0;
  for (int64_t count : counts) {
    USP_CHECK(count >= 0, "assign_slots: an expert with {} choices", count);
    sum += count;
  }
  USP_CHECK(sum <= choices.numel(),
            "assign_slots: the experts' counts add up to {}, and there are {} choices", sum,
            choices.numel());
  OpScope("assign_slots", 0, slots, choices)->assign_slots(slots, choices, counts);
}

void permute(Tensor rows, const Tensor& x, const Tensor& slots) {
  check_rows(rows, x, "permute");
  check_choices(slots, x.size(0), "permute: slots");
  OpScope("permute", 0, rows, x, slots)->permute(rows, x, slots);
}

void unpermute(Tensor y, const Tensor& rows, const Tensor& slots, const Tensor& gates,
               bool accumulate) {
  check_unpermute(y, rows, slots, gates);
  OpScope("unpermute", Flag{accumulate}, 0, y, rows, slots, gates)
      ->unpermute(y, rows, slots, gates, accumulate ? y : Tensor());
}

void unpermute_onto(Tensor y, const Tensor& residual, const Tensor& rows, const Tensor& slots,
                    const Tensor& gates) {
  if (!Runtime::current().backend().fused()) {
    unpermute(y, rows, slots, gates);
    return add(y, residual, y);
  }
  check_unpermute(y, rows, slots, gates);
  check_operand(residual, y.shape(), y.dtype(), "unpermute_onto: residual");
  OpScope("unpermute_add", 0, y, residual, rows, slots, gates)
      ->unpermute(y, rows, slots, gates, residual);
}

void unpermute_backward(Tensor drows, Tensor dgates, const Tensor& dy, const Tensor& rows,
                        const Tensor& slots, const Tensor& gates) {
  check_rows(rows, dy, "unpermute_backward: rows");
  check_rows(drows, dy, "unpermute_backward: drows");
  check_shape(drows, rows.shape(), "unpermute_backward: drows");
  check_choices(slots, dy.size(0), "unpermute_backward: slots");
  const DType acc = accumulate_dtype(dy.dtype());
  check_operand(gates, slots.shape(), acc, "unpermute_backward: gates");
  check_operand(dgates, slots.shape(), acc, "unpermute_backward: dgates");
  OpScope("unpermute_backward", 0, drows, dgates, dy, rows, slots, gates)
      ->unpermute_backward(drows, dgates, dy, rows, slots, gates);
}

void grouped_linear_forward(Tensor y, const Tensor& x, const Tensor& weights,
                            std::span<const int64_t> counts) {
  const int64_t flops = check_grouped(y, x, weights, counts, "grouped_linear_forward");
  check_operand(weights, weights.shape(), x.dtype(), "grouped_linear_forward: weights");
  OpScope("grouped_linear_forward", flops, y, x, weights)
      ->grouped_linear_forward(y, x, weights, counts);
}

void grouped_linear_backward_input(Tensor dx, const Tensor& dy, const Tensor& weights,
                                   std::span<const int64_t> counts) {
  const int64_t flops = check_grouped(dy, dx, weights, counts, "grouped_linear_backward_input");
  check_operand(weights, weights.shape(), dx.dtype(), "grouped_linear_backward_input: weights");
  OpScope("grouped_linear_backward_input", flops, dx, dy, weights)
      ->grouped_linear_backward_input(dx, dy, weights, counts);
}

void grouped_linear_backward_weight(Tensor dweights, const Tensor& dy, const Tensor& x,
                                    std::span<const int64_t> counts, bool accumulate) {
  const int64_t flops = check_grouped(dy, x, dweights, counts, "grouped_linear_backward_weight");
  check_weight_gradient(dweights, dweights.shape(), x.dtype(),
                        "grouped_linear_backward_weight: dweights");
  OpScope("grouped_linear_backward_weight", Flag{accumulate}, flops, dweights, dy, x)
      ->grouped_linear_backward_weight(dweights, dy, x, counts, accumulate);
}

void balance_loss_forward(Tensor loss, const Tensor& scores, const Tensor& load, double scale,
                          bool normalised) {
  check_operand(loss, {1}, DType::f64, "balance_loss_forward: loss");
  check_scores(scores, "balance_loss_forward: scores");
  check_runs(load, scores.size(0), "balance_loss_forward: load");
  check_operand(load, {load.size(0), scores.size(1)}, scores.dtype(), "balance_loss_forward: load");
  OpScope("balance_loss_forward", 0, Uncounted{loss}, scores, load)
      ->balance_loss_forward(loss, scores, load, scale, normalised);
}

void balance_loss_backward(Tensor dscores, const Tensor& scores, const Tensor& load, double scale,
                           bool normalised) {
  check_scores(scores, "balance_loss_backward: scores");
  check_operand(dscores, scores.shape(), scores.dtype(), "balance_loss_backward: dscores");
  check_runs(load, scores.size(0), "balance_loss_backward: load");
  check_operand(load, {load.size(0), scores.size(1)}, scores.dtype(),
                "balance_loss_backward: load");
  OpScope("balance_loss_backward", 0, dscores, dscores, scores, load)
      ->balance_loss_backward(dscores, scores, load, scale, normalised);
}

void z_loss_forward(Tensor loss, const Tensor& logits, double scale) {
  check_operand(loss, {1}, DType::f64, "z_loss_forward: loss");
  check_scores(logits, "z_loss_forward: logits");
  OpScope("z_loss_forward", 0, Uncounted{loss}, logits)->z_loss_forward(loss, logits, scale);
}

void z_loss_backward(Tensor dlogits, const Tensor& logits, double scale) {
  check_scores(logits, "z_loss_backward: logits");
  check_operand(dlogits, logits.shape(), logits.dtype(), "z_loss_backward: dlogits");
  OpScope("z_loss_backward", 0, dlogits, dlogits, logits)->z_loss_backward(dlogits, logits, scale);
}

void router_entropy(Tensor sum, const Tensor& scores) {
  check_operand(sum, {1}, DType::f64, "router_entropy: sum");
  check_scores(scores, "router_entropy: scores");
  OpScope("router_entropy", 0, Uncounted{sum}, scores)->router_entropy(sum, scores);
}

void balance_bias(Tensor bias, const Tensor& load, double rate) {
  check_router_dtype(bias, "balance_bias: bias");
  check_operand(bias, {bias.numel()}, bias.dtype(), "balance_bias: bias");
  check_operand(load, bias.shape(), bias.dtype(), "balance_bias: load");
  OpScope("balance_bias", 0, bias, load)->balance_bias(bias, load, rate);
}

}  // namespace usp::ops
