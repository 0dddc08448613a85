#include "train_step.h"

#include <cmath>

#include "accounting/pipeline_accountant.h"
#include "accounting/traffic.h"
#include "base/clock.h"
#include "tensor/runtime.h"
#include "train/pretrained.h"

namespace usp {

// [trainer]
Trainer::Trainer(const TrainConfig& config, const RunContext& context)
    : config_(config),
      view_(config, context.mesh),
      model_(config, view_),
      grads_(model_.parameters()),
      optimizer_(model_.parameters(), config.optimizer),
      mesh_(context.mesh),
      pipeline_(config, model_, grads_, view_.region, mesh_),
      data_parallel_(make_data_parallel(config, model_, grads_, optimizer_, mesh_)),
      dataset_(context.dataset) {
  view_.load->allocate(config.model.experts.num_experts, parse_dtype(config.dtype));
  if (config.model.pretrained) {
    load_pretrained(model_.parameters(), config.model.model, view_.load->buffers());
  }
  copies_.emplace(config.composition.check_copies, mesh_, model_.parameters(),
                  view_.load->buffers());
  const CategoryScope scope(Category::workspace);
  loss_ = Tensor::zeros({1}, DType::f64);
}
// [trainer]

// [take_batch]
Pass Trainer::take_batch(Split split, int64_t first_sample, int64_t num_samples) const {
  const TraceScope trace("take_batch");
  const int64_t seq_len = config_.seq_len;
  std::vector<int32_t> tokens(num_samples * seq_len), targets(num_samples * seq_len);
  if (dataset_ != nullptr) dataset_->read(split, first_sample, tokens, targets);
  Pass pass;
  pass.seed = uint64_t(config_.seed);
  pass.first_sample = first_sample;
  pass.num_samples = num_samples;
  pass.seq_len = seq_len;
  // [rows]
  std::vector<int32_t> begins(dataset_ == nullptr ? tokens.size() : 0);  // on paper one a sample
  if (dataset_ != nullptr) begins = dataset_->document_begins(split, first_sample, num_samples);
  view_.context.take_rows(tokens, targets, pass, std::move(begins));
  // [rows]
  pass.loss = loss_;
  return pass;
}
// [take_batch]

// [forward_backward]
// [forward_backward]

// [train_step]
void Trainer::train_step(int64_t step) {
  step_begin_ = clock_ns();
  const Runtime& runtime = Runtime::current();
  const double flops_before = runtime.flops();
  const NoHostReads no_host_reads;
  const TraceScope trace("train_step");
  ops::fill(loss_, 0);
  // [samples]
  data_parallel_->begin_step(pipeline_.micro_batches_of_chunk(), config_.tensor_parallel.halves());
  traffic_.begin_step();
  view_.load->begin_step();
  const auto take = [&](int64_t micro_step) {
    // Each micro-step, the ranks take the next micro-batches of the global batch, in their order.
    const int64_t micro_batch = micro_step * mesh_.dp().size() + mesh_.dp().rank();
    const int64_t first_sample =
        step * config_.global_batch_size() + micro_batch * config_.micro_batch_size;
    Pass pass = take_batch(Split::train, first_sample, config_.micro_batch_size);
    pass.micro_batch = micro_step;
    // The mean is over the tokens of the whole batch, so the gradients only ever add up.
    pass.loss_scale = 1 / double(config_.tokens_per_step());
    return pass;
  };
  pipeline_.train(take);
  // [samples]
  // [after_backward]
  grads_.end_window();
  data_parallel_->finish();
  const Tensor squares = optimizer_.grad_squares();
  mesh_.world().all_reduce(squares);  // 8 bytes: of all shards, each counted on one rank
  optimizer_.step(step, learning_rate(config_.optimizer, step, config_.steps), squares);
  data_parallel_->after_update();
  traffic_.end_step();
  view_.load->end_step();
  // [after_backward]
  tokens_ += config_.tokens_per_step();
  flops_ = runtime.flops() - flops_before;
}
// [train_step]

Tensor Trainer::logits(const Pass& pass) {
  // [logits]
  return gather_vocabulary(pipeline_.logits(pass), config_.model.vocab_size, mesh_.tp());
  // [logits]
}

// [state]
TrainState Trainer::state() {
  return {model_.parameters(), optimizer_.states(), tokens_, view_.load->buffers()};
}
// [state]

// [report]
StepMetrics Trainer::report(int64_t step, double peak_gflops) {
  StepMetrics metrics;
  metrics.step = step + 1;
  mesh_.world().all_reduce(loss_);  // 8 bytes
  metrics.loss = loss_.item();
  metrics.grad_norm = optimizer_.grad_norm().item();
  metrics.took(step_begin_, config_.tokens_per_step());
  metrics.lr = learning_rate(config_.optimizer, step, config_.steps);
  metrics.tokens = tokens_;
  const double S = double(config_.seq_len), tokens = double(config_.tokens_per_step());
  metrics.needed_flops = tokens * model_flops_per_token(config_.model, (S + 1) / 2);
  metrics.book_flops = tokens * model_flops_per_token(config_.model, S);
  metrics.flops = mesh_.world().sum(flops_);
  metrics.relate_to(peak_gflops);
  // [load]
  metrics.further = expert_metrics(*view_.load, config_, mesh_.world());
  // [load]
  // [copies]
  copies_->after_step(step, [this] { return state(); });
  // [copies]
  return metrics;
}
// [report]

// [evaluate]
double Trainer::evaluate() {
  const TraceScope trace("evaluate");
  const int64_t there = dataset_ != nullptr ? dataset_->val_samples() : config_.eval_samples;
  const int64_t samples = std::min(config_.eval_samples, there);
  if (samples == 0) return std::nan("");
  ops::fill(loss_, 0);
  const int64_t at_once = config_.samples_of_pass();
  std::vector<Pass> passes;
  for (int64_t begin = 0; begin < samples; begin += mesh_.dp().size() * at_once) {
    // Every rank runs as many passes, the last ones perhaps over nothing: weights may be gathered.
    const int64_t first = std::min(samples, begin + mesh_.dp().rank() * at_once);
    const int64_t count = std::min(at_once, samples - first);
    Pass pass = take_batch(Split::validation, first, count);
    pass.mode = Pass::Mode::eval;
    pass.loss_scale = 1 / double(samples * config_.seq_len);
    passes.push_back(std::move(pass));
  }
  pipeline_.evaluate(passes);
  mesh_.world().all_reduce(loss_);
  return loss_.item();
}
// [evaluate]

ReportRows Trainer::report_rows() {
  // [report_rows]
  ReportRows rows = prediction_rows(predict(config_, mesh_.world().rank()));
  traffic_.add_rows(rows, step_traffic(config_, mesh_.world().rank()));
  if (config_.pipeline.pp_size > 1) {
    rows.push_back(measured_work_row(config_, pipeline_.measured()));
  }
  return rows;
  // [report_rows]
}

}  // namespace usp
