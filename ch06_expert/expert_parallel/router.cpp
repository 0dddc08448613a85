#include "expert_parallel/router.h"

#include <cmath>
#include <numeric>

#include "context_parallel/attention.h"
#include "expert_parallel/node_dispatch.h"
#include "tensor/recorder.h"
#include "tensor/runtime.h"

namespace usp {

Tensor RouterLinear::output(const Saved& saved, const Tensor& residual) const {
  const Tensor w = weight();
  const DType acc = accumulate_dtype(saved.x.dtype());
  Tensor y = Tensor::empty({saved.x.size(0), w.size(0)}, acc, output_name());
  ops::linear_forward(y, saved.x, w, residual);
  return y;
}

Router::Router(const ExpertShape& shape, std::unique_ptr<Linear> linear, const ExpertGroup& experts,
               const TensorRegion& region, const ContextGroup& context, const LayerLoad& load)
    : shape_(shape),
      linear_(std::move(linear)),
      experts_(experts),
      region_(region),
      context_(context),
      load_(&load) {}

void Router::forward(const Tensor& x, Saved& saved, Routing& routing, const Pass& pass) const {
  saved.logits = linear_->forward(x, saved.linear, pass);  // [T, E]
  saved.scores = Tensor::empty(saved.logits.shape(), saved.logits.dtype(), "scores");
  ops::router_scores(saved.scores, saved.logits, score());
  if (!routing.choices.defined()) choose(saved.scores, routing, saved, pass);
  routing.gates = Tensor::empty(routing.choices.shape(), saved.scores.dtype(), "gates");
  ops::gates_forward(routing.gates, saved.scores, routing.choices, shape_.norm_topk_prob,
                     shape_.routed_scaling_factor);
  if (pass.mode == Pass::Mode::train) add_losses(saved, pass);
}

void Router::choose(const Tensor& scores, Routing& routing, Saved& saved, const Pass& pass) const {
  const int64_t T = scores.size(0), E = shape_.num_experts, k = shape_.num_experts_per_tok;
  const ExpertConfig& config = experts_.config();
  // [choose]
  routing.choices = Tensor::empty({T, k}, DType::i32, "choices");
  ops::choose_experts(routing.choices, scores, load_->bias, shape_.expert_nodes,
                      shape_.nodes_of_token());
  // [choose]
  Tensor kept = routing.choices;
  const bool drops = config.capacity_factor > 0 && pass.mode != Pass::Mode::decode;
  const bool balances = config.balance == "sample" && pass.mode == Pass::Mode::train;
  SampleCounts samples;
  if (T > 0 && (drops || balances)) samples = count_samples(routing.choices, pass);
  if (samples.runs > 0 && balances) {
    saved.load = Tensor::empty({samples.runs, E}, scores.dtype(), "load");
    const CategoryScope small(Category::workspace);
    const std::vector<double> all(samples.all.begin(), samples.all.end());
    ops::copy(saved.load, Tensor::from_host(all, saved.load.shape(), scores.dtype()));
  }
  if (samples.runs > 0 && drops) kept = drop(routing.choices, samples, pass);
  if (experts_.nodes() != nullptr) {
    route_by_node(routing, kept, E, *experts_.nodes());
  } else {
    assign_rows(routing, kept, E, /*expected=*/T * k, experts_);
  }
  if (pass.mode == Pass::Mode::train && enters_losses()) record(routing.choices, kept, scores);
}

void assign_rows(Routing& routing, const Tensor& destinations, int64_t number, int64_t expected,
                 const ExpertGroup& ranks) {
  routing.slots = Tensor::empty(destinations.shape(), DType::i32, "slots");
  const CategoryScope small(Category::workspace);
  const Tensor counts = Tensor::empty({1, number}, DType::i32);
  ops::count_choices(counts, destinations);
  routing.rows = ranks.exchange_counts(counts.view({number}), expected);
  ops::assign_slots(routing.slots, destinations, routing.rows.to_experts);
}

Tensor Router::drop(const Tensor& choices, const SampleCounts& samples, const Pass& pass) const {
  const CategoryScope small(Category::workspace);
  const double mean =
      double(shape_.num_experts_per_tok * pass.seq_len) / double(shape_.num_experts);
  const auto capacity = static_cast<int64_t>(std::ceil(experts_.config().capacity_factor * mean));
  const std::vector<int32_t> before(samples.before.begin(), samples.before.end());
  const Tensor kept = Tensor::empty(choices.shape(), DType::i32);
  ops::copy(kept, choices);
  ops::drop_choices(kept, Tensor::from_host(before, {samples.runs, shape_.num_experts}), capacity);
  return kept;
}

void Router::record(const Tensor& choices, const Tensor& kept, const Tensor& scores) const {
  const RecordedPhase counts_tokens("sums over rows");  // what comes back from the host is
  const CategoryScope small(Category::workspace);
  const int64_t E = shape_.num_experts;
  const Tensor chosen = Tensor::empty({1, E}, DType::i32),
               taken = Tensor::empty({1, E}, DType::i32);
  ops::count_choices(chosen, choices);
  ops::count_choices(taken, kept);
  std::vector<double> counts(E);
  double dropped = 0;
  if (chosen.device() != Device::meta) {
    const std::vector<int64_t> all = chosen.counts(), some = taken.counts();
    std::ranges::copy(all, counts.begin());
    for (int64_t e = 0; e < E; ++e) dropped += double(all[e] - some[e]);
  }
  ops::accumulate(load_->counts, Tensor::from_host(counts, {E}, scores.dtype()));
  ops::accumulate(load_->dropped, Tensor::from_host(std::vector{dropped}, {1}, scores.dtype()));
  ops::router_entropy(load_->entropy, scores);
}

int64_t run_length(const ContextParallelConfig& context, int64_t rows, int64_t seq_len) {
  int64_t length = rows;
  for (int64_t rank = 0; rank < context.cp_size; ++rank) {
    const Positions positions = context.of_rank(seq_len, rank);
    length = std::gcd(length, std::gcd(positions.run_from(0), positions.count()));
  }
  return length;
}

Router::SampleCounts Router::count_samples(const Tensor& choices, const Pass& pass) const {
  const CategoryScope small(Category::workspace);
  const int64_t T = choices.size(0), E = shape_.num_experts;
  const int64_t first = experts_.config().expert_tp ? 0 : region_.first_row(T, pass);
  const int64_t length = run_length(context_.config(), T, pass.seq_len);
  std::vector<int32_t> begins;  // of the runs, counted in the micro-batch's samples
  each_run(pass, first, T, [&](int64_t, int64_t count, int64_t token) {
    for (int64_t i = 0; i < count; i += length) {
      begins.push_back(int32_t(token + i - pass.first_sample * pass.seq_len));
    }
  });
  const int64_t runs = std::ssize(begins);
  const Tensor counts = Tensor::empty({runs, E}, DType::i32);
  ops::count_choices(counts, choices);
  const Tensor numbers = Tensor::empty({runs, E + 1}, DType::i32);
  ops::copy(numbers.narrow(1, 0, E), counts);
  ops::copy(numbers.narrow(1, E, 1), Tensor::from_host(begins, {runs, 1}));
  const Tensor of_ranks = gather_from_sample(numbers, pass);
  SampleCounts result{runs, std::vector<int64_t>(runs * E), std::vector<int64_t>(runs * E)};
  if (choices.device() == Device::meta) return result;
  const std::vector<int64_t> all = of_ranks.counts();
  for (int64_t run = 0; run < runs; ++run) {
    for (auto other = all.begin(); other != all.end(); other += E + 1) {
      if (other[E] / pass.seq_len != begins[run] / pass.seq_len) continue;
      for (int64_t e = 0; e < E; ++e) {
        result.all[run * E + e] += other[e];
        if (other[E] < begins[run]) result.before[run * E + e] += other[e];
      }
    }
  }
  return result;
}

Tensor Router::gather_from_sample(Tensor numbers, const Pass& pass) const {
  if (!experts_.config().expert_tp && region_.shares_rows(pass)) {
    numbers = region_.gather(numbers).wait();
  }
  if (context_.size() == 1) return numbers;
  const Tensor all =
      Tensor::empty({context_.size() * numbers.size(0), numbers.size(1)}, DType::i32);
  context_.cp().all_gather(all, numbers);
  return all;
}

double Router::balance_scale(const Pass& pass) const {
  // Counts over their mean are 1 where all experts are alike.
  const ExpertConfig& config = experts_.config();
  const double tokens = config.balance == "sample" ? double(pass.seq_len) : 1 / pass.loss_scale;
  const double mean = double(shape_.num_experts_per_tok) * tokens / double(shape_.num_experts);
  return config.balance_coef * pass.loss_scale / mean;
}

void Router::add_losses(const Saved& saved, const Pass& pass) const {
  const ExpertConfig& config = experts_.config();
  if (!enters_losses()) return;
  if (config.has_loss()) {
    ops::balance_loss_forward(load_->loss, saved.scores, load_of(saved), balance_scale(pass),
                              score() == RouterScore::sigmoid);
  }
  if (config.router_z_loss_coef > 0) {
    ops::z_loss_forward(load_->loss, saved.logits, config.router_z_loss_coef * pass.loss_scale);
  }
}

Tensor Router::load_of(const Saved& saved) const {
  return saved.load.defined() ? saved.load : load_->before.view({1, shape_.num_experts});
}

Tensor Router::backward(const Tensor& dgates, Saved& saved, const Routing& routing, Grads& grads,
                        const Pass& pass) const {
  const ExpertConfig& config = experts_.config();
  const Tensor dscores = Tensor::zeros(saved.scores.shape(), saved.scores.dtype());
  ops::gates_backward(dscores, dgates, routing.gates, saved.scores, routing.choices,
                      shape_.norm_topk_prob, shape_.routed_scaling_factor);
  if (config.has_loss() && enters_losses()) {
    ops::balance_loss_backward(dscores, saved.scores, load_of(saved), balance_scale(pass),
                               score() == RouterScore::sigmoid);
  }
  ops::router_scores_backward(dscores, dscores, saved.scores, score());
  const Tensor& dlogits = dscores;
  if (config.router_z_loss_coef > 0 && enters_losses()) {
    ops::z_loss_backward(dlogits, saved.logits, config.router_z_loss_coef * pass.loss_scale);
  }
  const Tensor rounded = in_dtype(dlogits, saved.linear.x.dtype());
  return linear_->backward(rounded, saved.linear, grads, pass);
}

Footprint Router::footprint(const PassShape& shape) const {
  const ExpertConfig& config = experts_.config();
  const int64_t T = config.expert_tp ? shape.tokens() : shape.rows();
  const int64_t scores = T * shape_.num_experts * shape.acc();
  const int64_t choices = T * shape_.num_experts_per_tok * bytes_of(DType::i32);
  const int64_t gates = T * shape_.num_experts_per_tok * shape.acc();
  Footprint result{.kept = {{"router", scores}, {"scores", scores}, {"gates", gates}},
                   .kept_through_recompute = {{"choices", choices}, {"slots", choices}}};
  if (const NodeGroups* nodes = experts_.nodes()) {
    const int64_t k = shape_.num_experts_per_tok;
    const int64_t numbers = even_copies(T, k, *nodes).received * k * bytes_of(DType::i32);
    result.kept_through_recompute.push_back({"choices", numbers});
    result.kept_through_recompute.push_back({"slots", numbers});
  }
  if (config.balance == "sample") {
    const int64_t S = shape.seq_len * context_.size();
    const int64_t runs = T / run_length(context_.config(), T, S);
    result.kept_through_recompute.push_back({"load", runs * shape_.num_experts * shape.acc()});
  }
  result.keep(result.kept_through_recompute);
  return result;
}

}  // namespace usp
