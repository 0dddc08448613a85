#include "train_step.h"

#include <cmath>

#include "runtime.h"

namespace usp {

namespace {

Probabilities probabilities(const TrainConfig& config) {
  if (config.attention == "blockwise") return Probabilities::never_whole;
  return config.recompute == "selective" ? Probabilities::recomputed : Probabilities::stored;
}

}  // namespace

// [trainer]
Trainer::Trainer(const TrainConfig& config, const Dataset* dataset)
    : config_(config),
      dataset_(dataset),
      model_(config.model, config.seq_len, parse_dtype(config.dtype), probabilities(config),
             config.seed, parse_grad_accumulation(config.grad_accumulation)),
      grads_(model_.parameters()),
      optimizer_(model_.parameters(), config.optimizer) {
  // The embedding keeps nothing but its tokens, and what the head keeps is needed at once.
  if (config.recompute == "full") model_.recompute({1, config.model.num_layers + 1});
  const CategoryScope scope(Category::workspace);
  loss_ = Tensor::zeros({1}, DType::f64);
}
// [trainer]

// [take_batch]
Pass Trainer::take_batch(Split split, int64_t first_sample, int64_t num_samples) const {
  const TraceScope trace("take_batch");
  const int64_t seq_len = config_.seq_len;
  std::vector<int32_t> tokens(num_samples * seq_len), targets(num_samples * seq_len);
  for (int64_t i = 0; i < num_samples && dataset_ != nullptr; ++i) {
    const std::span<int32_t> inputs(tokens.data() + i * seq_len, seq_len);
    const std::span<int32_t> outputs(targets.data() + i * seq_len, seq_len);
    if (split == Split::train) {
      dataset_->train_sample(first_sample + i, inputs, outputs);
    } else {
      dataset_->val_sample(first_sample + i, inputs, outputs);
    }
  }
  Pass pass;
  pass.num_samples = num_samples;
  pass.positions = Positions(0, seq_len);
  pass.tokens = Tensor::from_host(tokens, {num_samples * seq_len}, "tokens");
  pass.targets = Tensor::from_host(targets, {num_samples * seq_len}, "targets");
  pass.loss = loss_;
  return pass;
}
// [take_batch]

void Trainer::forward_backward(const Pass& pass) {
  Model::Activations activations = model_.forward(pass);
  model_.backward(std::move(activations), grads_, pass);
}

// [train_step]
void Trainer::train_step(int64_t step) {
  step_begin_ = std::chrono::steady_clock::now();
  const Runtime& runtime = Runtime::current();
  const double flops_before = runtime.flops(), recomputed_before = runtime.recomputed_flops();
  const NoHostReads no_host_reads;
  const TraceScope trace("train_step");
  ops::fill(loss_, 0);
  grads_.begin_window(config_.grad_acc_steps);
  for (int64_t micro_step = 0; micro_step < config_.grad_acc_steps; ++micro_step) {
    const int64_t first_sample =
        step * config_.global_batch_size() + micro_step * config_.micro_batch_size;
    Pass pass = take_batch(Split::train, first_sample, config_.micro_batch_size);
    pass.micro_batch = micro_step;
    // The mean is over the tokens of all micro-batches, so the gradients only ever add up.
    pass.loss_scale = 1 / double(config_.tokens_per_step());
    forward_backward(pass);
  }
  grads_.end_window();
  const Tensor squares = optimizer_.grad_squares();
  optimizer_.step(step, learning_rate(config_.optimizer, step, config_.steps), squares);
  tokens_ += config_.tokens_per_step();
  flops_ = runtime.flops() - flops_before;
  recomputed_flops_ = runtime.recomputed_flops() - recomputed_before;
}
// [train_step]

// [state]
TrainState Trainer::state() { return {model_.parameters(), optimizer_.states(), tokens_}; }
// [state]

// [report]
StepMetrics Trainer::report(int64_t step, double peak_gflops) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = loss_.item();
  metrics.grad_norm = optimizer_.grad_norm().item();
  const auto elapsed = std::chrono::steady_clock::now() - step_begin_;
  const double seconds = std::chrono::duration<double>(elapsed).count();
  metrics.lr = learning_rate(config_.optimizer, step, config_.steps);
  metrics.tokens = tokens_;
  metrics.step_ms = 1e3 * seconds;
  metrics.tokens_per_s = double(config_.tokens_per_step()) / seconds;
  const double flops_per_token = model_flops_per_token(config_.model, config_.seq_len);
  if (peak_gflops > 0) {
    metrics.mfu = flops_per_token * metrics.tokens_per_s / (peak_gflops * 1e9);
    metrics.hfu = metrics.mfu * (flops_ / (flops_ - recomputed_flops_));
  }
  metrics.flops = flops_;
  return metrics;
}
// [report]

// [evaluate]
double Trainer::evaluate() {
  const TraceScope trace("evaluate");
  const int64_t samples = std::min(config_.eval_samples, dataset_->val_samples());
  if (samples == 0) return std::nan("");
  ops::fill(loss_, 0);
  for (int64_t first = 0; first < samples; first += config_.micro_batch_size) {
    const int64_t count = std::min(config_.micro_batch_size, samples - first);
    Pass pass = take_batch(Split::validation, first, count);
    pass.mode = Pass::Mode::eval;
    pass.loss_scale = 1 / double(samples * config_.seq_len);
    model_.evaluate(pass);
  }
  return loss_.item();
}
// [evaluate]

// [states_of_a_rank]
StateBytes predict_states(const TrainConfig& config) { return whole_states(config); }
std::vector<LiveBytes> predict_buffers(const TrainConfig&) { return {}; }
double book_states(const TrainConfig& config) { return book_whole_states(config); }
// [states_of_a_rank]

// [simulate]
Simulation simulate(const TrainConfig& config) {
  constexpr int64_t kSteps = 2;
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  Trainer trainer(config, /*dataset=*/nullptr);
  runtime.allocator().record_events(true);
  runtime.tracer().record(true);
  for (int64_t step = 0; step < kSteps; ++step) {
    runtime.tracer().set_step(step);
    trainer.train_step(step);
  }
  return make_simulation(kSteps);
}
// [simulate]

}  // namespace usp
