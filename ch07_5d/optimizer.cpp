#include "optimizer.h"

#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

Optimizer::Optimizer(ParameterList& parameters, const OptimizerConfig& config)
    : parameters_(parameters), config_(config) {
  const CategoryScope scope(Category::workspace);
  squares_ = Tensor::zeros({1}, DType::f64);
  norm_ = Tensor::zeros({1}, DType::f64);
  coefficient_ = Tensor::zeros({1}, DType::f64);
}

Tensor Optimizer::grad_squares() {
  const TraceScope trace("grad_squares");
  ops::fill(squares_, 0);
  std::vector<Tensor> grads;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].counted) grads.push_back(parameters_[i].shard.grad);
  }
  ops::add_squares(squares_, grads);
  return squares_;
}

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
  // [optimizer_step]
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
    for (const auto& observer : on_updated_) observer(parameter);
  }
  // [optimizer_step]
}

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
