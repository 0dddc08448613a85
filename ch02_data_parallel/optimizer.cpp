#include "optimizer.h"

#include <cmath>
#include <numbers>

#include "ops.h"
#include "runtime.h"

namespace usp {

double learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps) {
  if (step < config.warmup_steps) return config.lr * double(step + 1) / double(config.warmup_steps);
  const double span = double(std::max<int64_t>(1, steps - config.warmup_steps));
  const double progress = std::min(1.0, double(step - config.warmup_steps) / span);
  const double lr_min = config.min_lr_ratio * config.lr;
  return lr_min + (config.lr - lr_min) * (1 + std::cos(std::numbers::pi * progress)) / 2;
}

Optimizer::Optimizer(ParameterList& parameters, const OptimizerConfig& config)
    : parameters_(parameters), config_(config) {
  const CategoryScope scope(Category::workspace);
  squares_ = Tensor::zeros({1}, DType::f64);
  norm_ = Tensor::zeros({1}, DType::f64);
  coefficient_ = Tensor::zeros({1}, DType::f64);
}

// [grad_squares]
Tensor Optimizer::grad_squares() {
  const TraceScope trace("grad_squares");
  ops::fill(squares_, 0);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].counted) continue;
    ops::sum_squares(squares_, parameters_[i].shard.grad, /*accumulate=*/true);
  }
  return squares_;
}
// [grad_squares]

// [optimizer_step]
void Optimizer::step(int64_t step, double lr, const Tensor& squares) {
  const TraceScope trace("optimizer");
  if (!m_.defined()) allocate_states();
  ops::clip_coefficient(coefficient_, norm_, squares, config_.grad_clip);
  AdamWSettings settings;
  settings.lr = lr;
  settings.beta1 = config_.adam_beta1;
  settings.beta2 = config_.adam_beta2;
  settings.eps = config_.adam_eps;
  settings.step = step + 1;
  int64_t offset = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const Shard& shard = parameter.shard;
    // Decay pulls weights that multiply others towards 0; a norm's scale belongs near 1.
    settings.weight_decay = parameter.global_shape.rank() >= 2 ? config_.weight_decay : 0;
    ops::adamw(shard.value, shard.master, m_.narrow(0, offset, shard.numel()),
               v_.narrow(0, offset, shard.numel()), shard.grad, coefficient_, settings);
    ++parameter.version;
    offset += shard.numel();
    if (on_updated_) on_updated_(parameter);
  }
}
// [optimizer_step]

// [states]
std::vector<OptimizerState> Optimizer::states() {
  if (!m_.defined()) allocate_states();
  return {{"first_moment", m_}, {"second_moment", v_}};
}
// [states]

void Optimizer::allocate_states() {
  const CategoryScope scope(Category::optimizer);
  int64_t numel = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) numel += parameters_[i].shard.numel();
  const DType dtype = parameters_[0].shard.master.dtype();
  m_ = Tensor::zeros({numel}, dtype);
  v_ = Tensor::zeros({numel}, dtype);
}

}  // namespace usp
