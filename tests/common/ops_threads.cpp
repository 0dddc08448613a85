#include <map>

#include "attention_case.h"
#include "expert_case.h"

/// Every loop of ours gives the same bits whatever the number of threads; so does all of f64. The
/// sizes are odd, and large enough for the work to be split.
namespace usp::test {
namespace {

using Outputs = std::map<std::string, std::vector<char>>;

void run_elementwise(Random& random, DType dtype, Outputs& outputs) {
  const int64_t T = 403, F = 161;
  const Tensor gate_up = random.tensor({T, 2 * F}, dtype), dy = random.tensor({T, F}, dtype);
  const Tensor y = Tensor::empty({T, F}, dtype), dgate_up = Tensor::empty({T, 2 * F}, dtype);
  ops::swiglu_forward(y, gate_up);
  outputs["swiglu_forward"] = bits_of(y);
  ops::swiglu_backward(dgate_up, dy, gate_up);
  outputs["swiglu_backward"] = bits_of(dgate_up);
  ops::add(y, y, dy);
  outputs["add"] = bits_of(y);
  const Tensor copied = Tensor::empty({F, T}, dtype);
  ops::copy(copied, dy.transposed());
  outputs["copy"] = bits_of(copied);
  ops::fill(copied, 0.3);
  outputs["fill"] = bits_of(copied);
  const Tensor angles = random.tensor({101, 10}, accumulate_dtype(dtype));
  const Tensor x = random.tensor({4, 101, 5, 20}, dtype);
  ops::rope(x, angles, angles, Positions(0, 101), false);
  outputs["rope"] = bits_of(x);
}

void run_rows(Random& random, DType dtype, Outputs& outputs) {
  const DType acc = accumulate_dtype(dtype);
  const int64_t T = 403, H = 193, V = 91;
  const Tensor x = random.tensor({T, H}, dtype), dy = random.tensor({T, H}, dtype);
  const Tensor weight = random.tensor({H}, dtype), y = Tensor::empty({T, H}, dtype);
  const Tensor rstd = Tensor::empty({T}, acc), dweight = Tensor::empty({H}, acc);
  ops::rmsnorm_forward(y, rstd, x, weight, 1e-5);
  outputs["rmsnorm_forward"] = bits_of(y);
  ops::rmsnorm_backward_input(y, dy, x, weight, rstd, dy);
  outputs["rmsnorm_backward_input"] = bits_of(y);
  ops::rmsnorm_backward_weight(dweight, dy, x, rstd, false);
  outputs["rmsnorm_backward_weight"] = bits_of(dweight);

  const Tensor tokens = random.token_tensor(T, V), table = random.tensor({V, H}, dtype);
  const Tensor dtable = Tensor::empty({V, H}, acc);
  ops::embedding_forward(y, table, tokens);
  outputs["embedding_forward"] = bits_of(y);
  ops::embedding_backward(dtable, dy, tokens, 0, false);
  outputs["embedding_backward"] = bits_of(dtable);

  const Tensor targets = random.token_tensor(T, H), loss = Tensor::zeros({1}, DType::f64);
  const Tensor row_max = Tensor::empty({T}, acc), row_sum = Tensor::empty({T}, acc);
  const Tensor target_logit = Tensor::empty({T}, acc), lse = Tensor::empty({T}, acc);
  ops::cross_entropy_forward(row_max, row_sum, target_logit, x, targets);
  outputs["cross_entropy_forward"] = bits_of(row_sum);
  ops::cross_entropy_loss(loss, lse, row_max, row_sum, target_logit, 0.1);
  outputs["cross_entropy_loss"] = bits_of(loss);
  ops::cross_entropy_backward(y, x, targets, lse, 0, 0.1);
  outputs["cross_entropy_backward"] = bits_of(y);
}

void run_router(Random& random, DType acc, Outputs& outputs) {
  const int64_t T = 904, E = 97, k = 5, runs = 4;
  const Tensor logits = random.tensor({T, E}, acc), scores = Tensor::empty({T, E}, acc);
  const Tensor gradient = random.tensor({T, E}, acc), load = random.tensor({runs, E}, acc);
  const Tensor choices = Tensor::empty({T, k}, DType::i32), gates = random.tensor({T, k}, acc);
  ops::router_scores(scores, logits, RouterScore::softmax);
  ops::router_scores_backward(gradient, gradient, scores, RouterScore::softmax);
  ops::balance_loss_backward(gradient, scores, load, 0.1, true);
  ops::z_loss_backward(gradient, logits, 0.1);
  const Tensor dgates = clone(gates), loss = Tensor::zeros({1}, DType::f64);
  ops::choose_experts(choices, scores, {});
  outputs["choose_experts"] = bits_of(choices);
  ops::gates_forward(gates, scores, choices, true, 2);
  ops::gates_backward(gradient, dgates, gates, scores, choices, true, 2);
  outputs["the router's gradient"] = bits_of(gradient);
  outputs["gates_forward"] = bits_of(gates);
  ops::balance_loss_forward(loss, scores, load, 0.1, true);
  ops::z_loss_forward(loss, logits, 0.1);
  ops::router_entropy(loss, scores);
  outputs["the router's losses"] = bits_of(loss);
  const Tensor counts = Tensor::empty({runs, E}, DType::i32);
  ops::count_choices(counts, choices);
  outputs["count_choices"] = bits_of(counts);
  ops::drop_choices(choices, counts, 40);
  outputs["drop_choices"] = bits_of(choices);
}

void run_experts(Random& random, DType dtype, Outputs& outputs) {
  const DType acc = accumulate_dtype(dtype);
  const int64_t T = 403, H = 193;
  const Routes routes(random, T, 9, 3, 0.1);
  const Tensor x = random.tensor({T, H}, dtype), rows = Tensor::empty({routes.R, H}, dtype);
  const Tensor gates = random.tensor({T, 3}, acc), y = random.tensor({T, H}, dtype);
  ops::permute(rows, x, routes.slots);
  outputs["permute"] = bits_of(rows);
  ops::unpermute(y, rows, routes.slots, gates, true);
  outputs["unpermute"] = bits_of(y);
  ops::unpermute_backward(rows, gates, y, rows, routes.slots, gates);
  outputs["unpermute_backward: drows"] = bits_of(rows);
  outputs["unpermute_backward: dgates"] = bits_of(gates);
}

void run_optimizer(Random& random, DType dtype, Outputs& outputs) {
  const int64_t numel = 100'003;
  const DType acc = accumulate_dtype(dtype);
  const Tensor master = random.tensor({numel}, acc), grad = random.tensor({numel}, acc);
  const Tensor value = dtype == acc ? master : Tensor::zeros({numel}, dtype);
  const Tensor m = Tensor::zeros({numel}, acc), v = Tensor::zeros({numel}, acc);
  const Tensor sum = Tensor::zeros({1}, DType::f64), norm = Tensor::zeros({1}, DType::f64);
  const Tensor coefficient = Tensor::zeros({1}, DType::f64);
  ops::sum_squares(sum, grad);
  outputs["sum_squares"] = bits_of(sum);
  ops::clip_coefficient(coefficient, norm, sum, 1);
  AdamWSettings settings;
  settings.lr = 0.1;
  ops::adamw(value, master, m, v, grad, coefficient, settings);
  outputs["adamw: value"] = bits_of(value);
  outputs["adamw: v"] = bits_of(v);
}

void run_attention(DType dtype, bool naive, Outputs& outputs) {
  const std::string kind = naive ? "naive " : "blockwise ";
  AttentionRun run({2, 6, 3, 20, {0, 50, 150, 55}, {0, 50, 150, 55}}, dtype, naive, 3);
  outputs[kind + "out"] = bits_of(run.out);
  outputs[kind + "lse"] = bits_of(run.lse);
  const auto gradients = run.backward();
  outputs["attention_delta"] = bits_of(run.delta);
  outputs[kind + "dq"] = bits_of(gradients.dq);
  outputs[kind + "dk"] = bits_of(gradients.dk);
  outputs[kind + "dv"] = bits_of(gradients.dv);
}

void run_merge(Random& random, DType dtype, Outputs& outputs) {
  const DType acc = accumulate_dtype(dtype);
  const Tensor out = random.tensor({3, 101, 4, 40}, acc), lse = random.tensor({3, 4, 101}, acc);
  const Tensor part = random.tensor(out.shape(), acc), part_lse = random.tensor(lse.shape(), acc);
  ops::attention_merge(out, lse, part, part_lse);
  outputs["attention_merge: out"] = bits_of(out);
  outputs["attention_merge: lse"] = bits_of(lse);
  const Tensor probs = random.tensor({3, 4, 101, 99}, dtype);
  ops::attention_rescale(probs, part_lse, lse);
  outputs["attention_rescale"] = bits_of(probs);
}

/// The softmax of naive attention alone: its matmuls belong to a library that promises less.
void run_causal_softmax(Random& random, DType dtype, Outputs& outputs) {
  const DType acc = accumulate_dtype(dtype);
  const Shape shape{2, 3, 101, 101};
  const Tensor scores = random.tensor(shape, dtype), dprobs = random.tensor(shape, dtype);
  const Tensor probs = Tensor::empty(shape, dtype), lse = Tensor::empty({2, 3, 101}, acc);
  Backend& backend = Runtime::current().backend();
  const Positions positions(0, 101);
  backend.causal_softmax_forward(probs, lse, scores, 0.2, positions, positions, {});
  outputs["causal_softmax_forward"] = bits_of(probs);
  backend.causal_softmax_backward(dprobs, dprobs, probs, lse, 0.2);
  outputs["causal_softmax_backward"] = bits_of(dprobs);
}

void run_matmul_f64(Random& random, Outputs& outputs) {
  const Tensor a = random.tensor({203, 301}), b = random.tensor({301, 99});
  const Tensor c = Tensor::zeros({203, 99}, DType::f64);
  ops::matmul(c, a, b);
  ops::matmul(c, b.transposed().narrow(1, 0, 203).transposed(), b.narrow(0, 0, 99), true);
  outputs["matmul"] = bits_of(c);
}

Outputs run_everything(DType dtype, int threads) {
  const Threads limit(threads);
  const OnDevice cpu;
  Random random(1);
  Outputs outputs;
  run_elementwise(random, dtype, outputs);
  run_rows(random, dtype, outputs);
  run_router(random, accumulate_dtype(dtype), outputs);
  run_experts(random, dtype, outputs);
  run_optimizer(random, dtype, outputs);
  run_attention(dtype, /*naive=*/false, outputs);
  run_merge(random, dtype, outputs);
  run_causal_softmax(random, dtype, outputs);
  if (dtype == DType::f64) {
    run_attention(dtype, /*naive=*/true, outputs);
    run_matmul_f64(random, outputs);
  }
  return outputs;
}

TEST_CASE("an operation's bits do not depend on the number of threads") {
  for (DType dtype : kFloatDTypes) {
    const Outputs alone = run_everything(dtype, 1);
    for (int threads : {2, 4}) {
      if (one_pass) continue;
      const Outputs shared = run_everything(dtype, threads);
      for (const auto& [operation, bits] : alone) {
        INFO(operation << " of " << name(dtype) << " on " << threads << " threads");
        const bool equal = shared.at(operation) == bits;
        REQUIRE(equal);
      }
    }
  }
}

}  // namespace
}  // namespace usp::test
