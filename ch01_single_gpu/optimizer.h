#pragma once

#include "config.h"
#include "parameter.h"

namespace usp {

/// Linear warm-up to config.lr, then half a cosine down to min_lr_ratio of it at the last step.
double learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps);

/// AdamW (Loshchilov & Hutter, 2019) behind global gradient-norm clipping. Nothing is read back:
/// norm, clipping factor and the check for finite gradients stay on the device.
class Optimizer {
 public:
  Optimizer(ParameterList& parameters, const OptimizerConfig& config);

  /// One update from the finished gradients; `step` counts from 0. Where the gradient norm is not
  /// finite, weights and moments stay as they are.
  void step(int64_t step, double lr);

  /// [1] f64: the norm of all gradients before clipping, as of the last step.
  const Tensor& grad_norm() const { return norm_; }
  /// [parameters.numel()], acc dtype: running means of gradients and of their squares; undefined
  /// before the first step.
  const Tensor& first_moments() const { return m_; }
  const Tensor& second_moments() const { return v_; }

 private:
  void allocate_states();
  void clip();

  ParameterList& parameters_;
  OptimizerConfig config_;
  Tensor m_, v_;               // [parameters.numel()], acc dtype
  Tensor sums_;                // [parameters.size()] f64: sum of squares of each gradient
  Tensor norm_, coefficient_;  // [1] f64
};

}  // namespace usp
