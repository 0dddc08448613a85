#pragma once

#include <map>

#include "base/rng.h"
#include "common/attention_case.h"
#include "common/expert_case.h"

/// Every operation once, on the device of the current Runtime.
namespace usp::test {

using Results = std::map<std::string, Tensor>;

inline Tensor zeros_of(int64_t count, DType dtype) { return Tensor::zeros({count}, dtype); }

inline Results run_elementwise(DType dtype, int64_t T, int64_t H) {
  Random random(1);
  Results results;
  const Tensor gate_up = random.tensor({T, 2 * H}, dtype), dy = random.tensor({T, H}, dtype);
  const Tensor y = Tensor::empty({T, H}, dtype), dgate_up = Tensor::empty({T, 2 * H}, dtype);
  ops::swiglu_forward(y, gate_up);
  ops::swiglu_backward(dgate_up, dy, gate_up);
  const Tensor sum = Tensor::empty({T, H}, dtype), filled = Tensor::empty({T, H}, dtype);
  ops::add(sum, y, dy);
  ops::fill(filled, 0.3);
  const Tensor total = random.tensor({T, H}, accumulate_dtype(dtype));
  ops::accumulate(total, dy);
  const Tensor dropped = Tensor::empty({T, H}, dtype);
  ops::dropout(dropped, dy, 0.3, RandomStream(7, "mask"), 5);
  const Tensor turned = Tensor::empty({H, T}, dtype), wide = Tensor::empty({T, H}, DType::f64);
  ops::copy(turned, dy.transposed());
  ops::copy(wide, dy);
  const Tensor narrow = Tensor::empty({T, H}, dtype);
  ops::copy(narrow, random.tensor({T, H}));
  return {{"swiglu_forward", y}, {"swiglu_backward", dgate_up}, {"add", sum},
          {"fill", filled},      {"accumulate", total},         {"dropout", dropped},
          {"copy", turned},      {"copy to f64", wide},         {"copy from f64", narrow}};
}

inline Results run_rows(DType dtype, int64_t T, int64_t H) {
  Random random(2);
  const DType acc = accumulate_dtype(dtype);
  const int64_t V = 11;
  const Tensor x = random.tensor({T, H}, dtype), dy = random.tensor({T, H}, dtype);
  const Tensor weight = random.tensor({H}, dtype), y = Tensor::empty({T, H}, dtype);
  const Tensor rstd = zeros_of(T, acc), dx = Tensor::empty({T, H}, dtype);
  const Tensor dweight = random.tensor({H}, acc), rounded = random.tensor({H}, dtype);
  ops::rmsnorm_forward(y, rstd, x, weight, 1e-5);
  ops::rmsnorm_backward_input(dx, dy, x, weight, rstd, dy);
  ops::rmsnorm_backward_weight(dweight, dy, x, rstd, true);
  ops::rmsnorm_backward_weight(rounded, dy, x, rstd, false);
  const Tensor tokens = random.token_tensor(T, V + 2), table = random.tensor({V, H}, dtype);
  const Tensor looked_up = Tensor::empty({T, H}, dtype), dtable = random.tensor({V, H}, acc);
  const Tensor rounded_dtable = Tensor::empty({V, H}, dtype);
  ops::embedding_forward(looked_up, table, tokens, 1);
  ops::embedding_backward(dtable, dy, tokens, 1, true);
  ops::embedding_backward(rounded_dtable, dy, tokens, 1, false);
  const Tensor angles = random.tensor({3 * T, H / 2}, acc);
  const Tensor heads = random.tensor({2, T, 4, H / 2 * 2}, dtype).narrow(2, 1, 2);
  ops::rope(heads, angles, angles, Positions(1, 1, T + 2, T - 1), true);
  return {{"rmsnorm_forward", y},
          {"rstd", rstd},
          {"rmsnorm_backward_input", dx},
          {"rmsnorm_backward_weight", dweight},
          {"dweight, rounded", rounded},
          {"embedding_forward", looked_up},
          {"embedding_backward", dtable},
          {"dtable, rounded", rounded_dtable},
          {"rope", heads}};
}

inline Results run_loss(DType dtype, int64_t T, int64_t V) {
  Random random(3);
  const DType acc = accumulate_dtype(dtype);
  const Tensor logits = random.tensor({T, V}, dtype), targets = random.token_tensor(T, V + 3);
  const Tensor loss = Tensor::zeros({1}, DType::f64), dlogits = Tensor::empty({T, V}, dtype);
  const Tensor row_max = zeros_of(T, acc), row_sum = zeros_of(T, acc), lse = zeros_of(T, acc);
  const Tensor target_logit = zeros_of(T, acc), max = Tensor::empty({T}, acc);
  ops::cross_entropy_forward(row_max, row_sum, target_logit, logits, targets, 2);
  ops::fill(max, 9);
  ops::cross_entropy_rescale(row_sum, row_max, max);
  ops::cross_entropy_loss(loss, lse, max, row_sum, target_logit, 0.4);
  ops::cross_entropy_backward(dlogits, logits, targets, lse, 2, 0.4);
  return {{"row_max", row_max}, {"row_sum", row_sum}, {"target_logit", target_logit},
          {"loss", loss},       {"lse", lse},         {"dlogits", dlogits}};
}

/// One update of two ranges, each with weights of its own and both with one gradient.
inline Results run_optimizer(DType dtype, int64_t numel) {
  Random random(4);
  const DType acc = accumulate_dtype(dtype);
  const Tensor grad = random.tensor({numel}, dtype);
  std::vector<AdamWRange> ranges;
  for (int range = 0; range < 2; ++range) {
    const Tensor master = random.tensor({numel}, acc);
    const Tensor value = dtype == acc ? master : Tensor::zeros({numel}, dtype);
    ranges.push_back(
        {value, master, Tensor::zeros({numel}, acc), Tensor::zeros({numel}, acc), grad});
  }
  const Tensor sum = random.tensor({1}, DType::f64, 0.1), norm = Tensor::zeros({1}, DType::f64);
  const Tensor coefficient = Tensor::zeros({1}, DType::f64);
  ops::sum_squares(sum, grad, true);
  for (const AdamWRange& range : ranges) ops::sum_squares(sum, range.master, true);
  Runtime::current().backend().fuse(true);
  ops::add_squares(sum, std::vector{grad, zeros_of(0, dtype), clone(grad)});
  Runtime::current().backend().fuse(false);
  ops::clip_coefficient(coefficient, norm, sum, 1);
  AdamWSettings settings;
  settings.lr = 0.1;
  ops::adamw(ranges, coefficient, settings);
  Results results{{"coefficient", coefficient}, {"norm", norm}};
  for (size_t i = 0; i < ranges.size(); ++i) {
    const std::string of = " of range " + std::to_string(i);
    results.insert({{"value" + of, ranges[i].value},
                    {"master" + of, ranges[i].master},
                    {"m" + of, ranges[i].m},
                    {"v" + of, ranges[i].v}});
  }
  return results;
}

inline Results run_attention(DType dtype, bool naive, const AttentionCase& c) {
  AttentionRun run(c, dtype, naive, 5);
  const auto [dq, dk, dv] = run.backward();
  const auto rounded = run.backward(dtype);
  return {{"out", run.out},
          {"lse", run.lse},
          {"delta", run.delta},
          {"dq", dq},
          {"dk", dk},
          {"dv", dv},
          {"dq, rounded", rounded.dq},
          {"dk, rounded", rounded.dk},
          {"dv, rounded", rounded.dv}};
}

inline Results run_parts(DType dtype, bool naive, const AttentionCase& c) {
  const AttentionRun run(c, dtype, naive, 5);
  Random random(8);
  const DType acc = accumulate_dtype(dtype);
  const Tensor out = Tensor::empty(c.q_shape(), acc), lse = Tensor::empty(c.lse_shape(), acc);
  const Tensor part = random.tensor(c.q_shape(), acc), part_lse = random.tensor(lse.shape(), acc);
  ops::attention_forward(out, lse, run.probs, run.q, run.k, run.v, run.scale, c.queries, c.keys);
  ops::attention_merge(out, lse, part, part_lse);
  if (!naive) return {{"merged out", out}, {"merged lse", lse}};
  ops::attention_rescale(run.probs, run.lse, lse);
  return {{"merged out", out}, {"merged lse", lse}, {"rescaled probs", run.probs}};
}

/// What a router does of `runs` runs of 8 tokens each, in the dtype in which it computes.
inline Results run_router(DType dtype, int64_t runs, int64_t E, int64_t k, int64_t groups,
                          int64_t allowed) {
  Random random(9);
  const int64_t T = 8 * runs;
  const Tensor logits = random.tensor({T, E}, dtype), softmax = Tensor::empty({T, E}, dtype);
  const Tensor sigmoid = Tensor::empty({T, E}, dtype), load = random.tensor({runs, E}, dtype);
  ops::router_scores(softmax, logits, RouterScore::softmax);
  ops::router_scores(sigmoid, logits, RouterScore::sigmoid);
  // Of other numbers, because where those of two devices differ they could choose differently.
  const Tensor bias = random.tensor({E}, dtype), choices = Tensor::empty({T, k}, DType::i32);
  const Tensor biased = Tensor::empty({T, k}, DType::i32);
  ops::choose_experts(choices, logits, {});
  ops::choose_experts(biased, logits, bias, groups, allowed);
  const Tensor gates = Tensor::empty({T, k}, dtype), shares = Tensor::empty({T, k}, dtype);
  const Tensor dgates = random.tensor({T, k}, dtype), dlogits = random.tensor({T, E}, dtype);
  const Tensor by_softmax = random.tensor({T, E}, dtype), by_sigmoid = clone(dlogits);
  ops::gates_forward(gates, softmax, choices, false, 2);
  ops::gates_forward(shares, sigmoid, biased, true, 2);
  ops::gates_backward(by_softmax, dgates, gates, softmax, choices, false, 2);
  ops::gates_backward(by_sigmoid, dgates, shares, sigmoid, biased, true, 2);
  const Tensor loss = random.tensor({1}), entropy = random.tensor({1}), z = random.tensor({1});
  for (bool normalised : {false, true}) {
    ops::balance_loss_forward(loss, sigmoid, load, 0.3, normalised);
    ops::balance_loss_backward(by_sigmoid, sigmoid, load, 0.3, normalised);
  }
  ops::router_scores_backward(by_softmax, by_softmax, softmax, RouterScore::softmax);
  ops::router_scores_backward(by_sigmoid, by_sigmoid, sigmoid, RouterScore::sigmoid);
  ops::z_loss_forward(z, logits, 0.2);
  ops::z_loss_backward(dlogits, logits, 0.2);
  ops::router_entropy(entropy, sigmoid);
  ops::balance_bias(bias, load.narrow(0, 0, 1).view({E}), 0.5);
  return {{"softmax", softmax},
          {"sigmoid", sigmoid},
          {"choices", choices},
          {"biased choices", biased},
          {"gates", gates},
          {"shares", shares},
          {"by softmax", by_softmax},
          {"by sigmoid", by_sigmoid},
          {"balance loss", loss},
          {"z-loss", z},
          {"dlogits", dlogits},
          {"entropy", entropy},
          {"bias", bias}};
}

/// What 40 tokens go through on their way to 5 experts, of which one is idle, and back.
inline Results run_experts(DType dtype, int64_t H) {
  Random random(10);
  const int64_t T = 40, E = 5, k = 3, F = 9;
  const DType acc = accumulate_dtype(dtype);
  const Routes routes(random, T, E, k, 0.1, 2);
  const Tensor counts = Tensor::empty({2, E}, DType::i32), kept = clone(routes.choices);
  ops::count_choices(counts, kept);
  ops::drop_choices(kept, counts, 20);
  const Tensor x = random.tensor({T, H}, dtype), rows = Tensor::empty({routes.R, H}, dtype);
  ops::permute(rows, x, routes.slots);
  const Tensor weights = random.tensor({E, F, H}, dtype), dweights = random.tensor({E, F, H}, acc);
  const Tensor hidden = Tensor::empty({routes.R, F}, dtype),
               dx = Tensor::empty(rows.shape(), dtype);
  ops::grouped_linear_forward(hidden, rows, weights, routes.counts);
  ops::grouped_linear_backward_input(dx, hidden, weights, routes.counts);
  ops::grouped_linear_backward_weight(dweights, hidden, rows, routes.counts, false);
  const Tensor gates = random.tensor({T, k}, acc), dgates = clone(gates), drows = clone(rows);
  const Tensor y = Tensor::empty({T, H}, dtype), added = random.tensor({T, H}, dtype);
  ops::unpermute(y, rows, routes.slots, gates);
  ops::unpermute(added, rows, routes.slots, {}, true);
  const Tensor onto = Tensor::empty({T, H}, dtype);
  Runtime::current().backend().fuse(true);
  ops::unpermute_onto(onto, x, rows, routes.slots, gates);
  Runtime::current().backend().fuse(false);
  ops::unpermute_backward(drows, dgates, x, drows, routes.slots, gates);
  return {{"slots", routes.slots}, {"counts", counts}, {"kept", kept},         {"rows", rows},
          {"hidden", hidden},      {"dx", dx},         {"dweights", dweights}, {"y", y},
          {"added", added},        {"onto", onto},     {"drows", drows},       {"dgates", dgates}};
}

inline Results run_matmuls(DType dtype, int64_t m, int64_t k, int64_t n) {
  Random random(6);
  const Tensor a = random.tensor({m, k}, dtype), b = random.tensor({k, n}, dtype);
  const Tensor c = random.tensor({m, n}, dtype), wide = random.tensor({n, m + 3}, dtype);
  ops::matmul(c, a, b, true);
  const Tensor turned = wide.narrow(1, 2, m);
  ops::matmul(turned, b.transposed(), a.transposed());
  const Tensor of_nothing = random.tensor({m, n}, dtype), kept = random.tensor({m, n}, dtype);
  ops::matmul(of_nothing, a.narrow(1, 0, 0), b.narrow(0, 0, 0));
  ops::matmul(kept, a.narrow(1, 0, 0), b.narrow(0, 0, 0), true);
  const Tensor weight = random.tensor({n, k}, dtype), more = random.tensor({m + 1, n}, dtype);
  const Tensor onto = Tensor::empty({m, n}, dtype), onto_odd = Tensor::empty({m, n}, dtype);
  Runtime::current().backend().fuse(true);
  ops::linear_forward(onto, a, weight, more.narrow(0, 0, m));
  ops::linear_forward(onto_odd, a, weight, more.narrow(0, 1, m));  // aligned as its rows are
  Runtime::current().backend().fuse(false);
  return {
      {"c", c},       {"cT", wide},          {"sum of nothing", of_nothing}, {"plus nothing", kept},
      {"onto", onto}, {"onto odd", onto_odd}};
}

}  // namespace usp::test
