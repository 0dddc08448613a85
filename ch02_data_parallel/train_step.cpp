#include "train_step.h"

#include <cmath>

#include "runtime.h"

namespace usp {

// [trainer]
Trainer::Trainer(const TrainConfig& config, const Dataset* dataset, const Mesh& mesh)
    : config_(config),
      dataset_(dataset),
      model_(config.model, config.seq_len, parse_dtype(config.dtype),
             /*store_probabilities=*/config.attention == "naive", config.seed),
      grads_(model_.parameters()),
      optimizer_(model_.parameters(), config.optimizer),
      mesh_(mesh),
      data_parallel_(config.data_parallel, model_.parameters(), grads_, mesh) {
  const CategoryScope scope(Category::workspace);
  loss_ = Tensor::zeros({1}, DType::f64);
}
// [trainer]

// [take_batch]
Pass Trainer::take_batch(Split split, int64_t first_sample, int64_t num_samples) const {
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
  pass.tokens = Tensor::from_host(tokens, {num_samples * seq_len});
  pass.targets = Tensor::from_host(targets, {num_samples * seq_len});
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
  const NoHostReads no_host_reads;
  const TraceScope trace("train_step");
  ops::fill(loss_, 0);
  grads_.begin_window(config_.grad_acc_steps);
  for (int64_t micro_step = 0; micro_step < config_.grad_acc_steps; ++micro_step) {
    // Each micro-step, the ranks take the next micro-batches of the global batch, in their order.
    const int64_t micro_batch = micro_step * mesh_.dp().size() + mesh_.dp().rank();
    const int64_t first_sample =
        step * config_.global_batch_size() + micro_batch * config_.micro_batch_size;
    Pass pass = take_batch(Split::train, first_sample, config_.micro_batch_size);
    // The mean is over the tokens of all ranks' micro-batches, so the gradients only ever add up.
    pass.loss_scale = 1 / double(config_.tokens_per_step());
    forward_backward(pass);
  }
  grads_.end_window();
  data_parallel_.finish();
  const Tensor squares = optimizer_.grad_squares();
  optimizer_.step(step, learning_rate(config_.optimizer, step, config_.steps), squares);
  tokens_ += config_.tokens_per_step();
}
// [train_step]

// [report]
StepMetrics Trainer::report(int64_t step, double peak_gflops) {
  StepMetrics metrics;
  metrics.step = step;
  mesh_.world().all_reduce(loss_);  // 8 bytes
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
  }
  return metrics;
}
// [report]

// [evaluate]
double Trainer::evaluate() {
  const TraceScope trace("evaluate");
  const int64_t samples = std::min(config_.eval_samples, dataset_->val_samples());
  if (samples == 0) return std::nan("");
  ops::fill(loss_, 0);
  const int64_t ranks = mesh_.dp().size(), rank = mesh_.dp().rank();
  for (int64_t first = rank * config_.micro_batch_size; first < samples;
       first += ranks * config_.micro_batch_size) {
    const int64_t count = std::min(config_.micro_batch_size, samples - first);
    Pass pass = take_batch(Split::validation, first, count);
    pass.loss_scale = 1 / double(samples * config_.seq_len);
    model_.evaluate(pass);
  }
  mesh_.world().all_reduce(loss_);
  return loss_.item();
}
// [evaluate]

}  // namespace usp
