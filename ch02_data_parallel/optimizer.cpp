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
  sums_ = Tensor::empty({static_cast<int64_t>(parameters.size())}, DType::f64);
  norm_ = Tensor::zeros({1}, DType::f64);
  coefficient_ = Tensor::zeros({1}, DType::f64);
}

// [optimizer_step]
void Optimizer::step(int64_t step, double lr) {
  const TraceScope trace("optimizer");
  if (!m_.defined()) allocate_states();
  clip();
  AdamWSettings settings;
  settings.lr = lr;
  settings.beta1 = config_.adam_beta1;
  settings.beta2 = config_.adam_beta2;
  settings.eps = config_.adam_eps;
  settings.step = step + 1;
  int64_t offset = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const int64_t numel = parameter.value.numel();
    const auto flat = [&](const Tensor& tensor) { return tensor.view({numel}); };
    // Decay pulls weights that multiply others towards 0; a norm's scale belongs near 1.
    settings.weight_decay = parameter.global_shape.rank() >= 2 ? config_.weight_decay : 0;
    ops::adamw(flat(parameter.value), flat(parameter.master), m_.narrow(0, offset, numel),
               v_.narrow(0, offset, numel), flat(parameter.grad), coefficient_, settings);
    offset += numel;
  }
}
// [optimizer_step]

void Optimizer::allocate_states() {
  const CategoryScope scope(Category::optimizer);
  const Tensor& masters = parameters_.flat_masters();
  m_ = Tensor::zeros(masters.shape(), masters.dtype());
  v_ = Tensor::zeros(masters.shape(), masters.dtype());
}

// [clip]
void Optimizer::clip() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    ops::sum_squares(sums_.narrow(0, static_cast<int64_t>(i), 1), parameters_[i].grad);
  }
  ops::clip_coefficient(coefficient_, norm_, sums_, config_.grad_clip);
}
// [clip]

}  // namespace usp
