#include "train/optimizer_config.h"

#include <cmath>
#include <limits>
#include <numbers>

namespace usp {

void OptimizerConfig::bind(Args& args) {
  args.group("Optimizer");
  args.bind("lr", lr, "peak learning rate");
  args.bind("min_lr_ratio", min_lr_ratio, "last learning rate as a fraction of lr");
  args.bind("warmup_steps", warmup_steps, "steps of linear warm-up");
  args.bind("adam_beta1", adam_beta1, "decay of the first moment");
  args.bind("adam_beta2", adam_beta2, "decay of the second moment");
  args.bind("adam_eps", adam_eps, "added to the square root");
  args.bind("weight_decay", weight_decay, "of parameters with two or more axes");
  args.bind("grad_clip", grad_clip, "largest gradient norm; 0: no clipping");
}

void OptimizerConfig::validate(const Args&) const {
  check_range("lr", lr, 0, HUGE_VAL);
  check_range("min_lr_ratio", min_lr_ratio, 0, 1);
  check_range("warmup_steps", double(warmup_steps), 0, HUGE_VAL);
  check_range("adam_beta1", adam_beta1, 0, std::nextafter(1.0, 0.0));
  check_range("adam_beta2", adam_beta2, 0, std::nextafter(1.0, 0.0));
  if (!(adam_eps >= std::numeric_limits<float>::min() && adam_eps < HUGE_VAL)) {
    usage_error(
        "adam_eps={} must be at least {:.2g}, the least normal f32: without it, the update of a "
        "weight that has no gradient is 0/0; try 1e-8",
        adam_eps, std::numeric_limits<float>::min());
  }
  check_range("weight_decay", weight_decay, 0, HUGE_VAL);
  check_range("grad_clip", grad_clip, 0, HUGE_VAL);
}

double learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps) {
  if (step < config.warmup_steps) return config.lr * double(step + 1) / double(config.warmup_steps);
  const double span = double(std::max<int64_t>(1, steps - config.warmup_steps));
  const double progress = std::min(1.0, double(step - config.warmup_steps) / span);
  const double lr_min = config.min_lr_ratio * config.lr;
  return lr_min + (config.lr - lr_min) * (1 + std::cos(std::numbers::pi * progress)) / 2;
}

}  // namespace usp
