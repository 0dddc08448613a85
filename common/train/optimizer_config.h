#pragma once

#include <cstdint>

#include "base/args.h"

namespace usp {

struct RunConfig;

/// AdamW, clipping, and the learning rate over the steps of a run.
struct OptimizerConfig {
  double lr = 2e-3;
  double min_lr_ratio = 0.1;
  int64_t warmup_steps = 20;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.95;
  double adam_eps = 1e-8;
  double weight_decay = 0.1;
  double grad_clip = 1.0;  ///< largest gradient norm; 0: no clipping

  void bind(Args& args);
  void validate(const Args& args) const;
  void check(const RunConfig&) const {}  ///< it goes together with everything
};

/// Linear warm-up to config.lr, then half a cosine down to min_lr_ratio * lr at the last step.
double learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps);

}  // namespace usp
