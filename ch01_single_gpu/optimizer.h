#pragma once

#include <functional>

#include "train/checkpoint.h"
#include "train/optimizer_config.h"
#include "train/parameter.h"

namespace usp {

/// AdamW (Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101) behind global gradient-norm
/// clipping. Nothing is read back: norm, clipping factor and the check for finite gradients stay on
/// the device.
class Optimizer {
 public:
  Optimizer(ParameterList& parameters, const OptimizerConfig& config);

  /// Sums the squares of the finished gradients that this rank counts: [1] f64.
  Tensor grad_squares();
  /// One update from the finished gradients, clipped by their norm: the root of `squares`, which is
  /// grad_squares() of all ranks. `step` counts from 0. Where the norm is not finite, weights and
  /// moments stay as they are.
  void step(int64_t step, double lr, const Tensor& squares);
  /// Adds an observer: step() calls it with each parameter whose shard it has just updated. Several
  /// are called in the order in which they were added.
  void on_updated(std::function<void(const Parameter&)> observer) {
    on_updated_.push_back(std::move(observer));
  }

  /// [1] f64: the norm of all gradients before clipping, as of the last step.
  const Tensor& grad_norm() const { return norm_; }
  /// The shards of all parameters side by side, acc dtype: running means of gradients and of their
  /// squares; undefined before the first step.
  const Tensor& first_moments() const { return m_; }
  const Tensor& second_moments() const { return v_; }
  /// Both moments by name, allocated where no step has done so yet.
  std::vector<OptimizerState> states();

 private:
  void allocate_states();

  ParameterList& parameters_;
  OptimizerConfig config_;
  std::vector<std::function<void(const Parameter&)>> on_updated_;
  Tensor m_, v_;                         // [elements of all shards], acc dtype
  Tensor squares_, norm_, coefficient_;  // [1] f64
};

}  // namespace usp
