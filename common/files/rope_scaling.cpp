#include "files/rope_scaling.h"

#include <cmath>
#include <numbers>

namespace usp {

double RopeScaling::scaled(double frequency) const {
  if (rope_type == "default") return frequency;
  if (rope_type == "linear") return frequency / rope_factor;
  const double waves = double(rope_original_max_position_embeddings) * frequency /
                       (2 * std::numbers::pi);  // that fit into the original context
  const double kept =
      (waves - rope_low_freq_factor) / (rope_high_freq_factor - rope_low_freq_factor);
  if (kept <= 0) return frequency / rope_factor;
  if (kept >= 1) return frequency;
  return kept * frequency + (1 - kept) * frequency / rope_factor;
}

void RopeScaling::bind(Args& args) {
  args.bind("rope_type", rope_type, {"default", "linear", "llama3"},
            "how RoPE reaches beyond the context it was trained on");
  args.bind("rope_factor", rope_factor, "times longer (rope_type linear and llama3)");
  args.bind("rope_low_freq_factor", rope_low_freq_factor,
            "llama3: waves that fit fewer times into the original context are stretched");
  args.bind("rope_high_freq_factor", rope_high_freq_factor,
            "llama3: waves that fit more often are kept");
  args.bind("rope_original_max_position_embeddings", rope_original_max_position_embeddings,
            "llama3: the original context");
}

void RopeScaling::validate() const {
  check_range("rope_factor", rope_factor, 1, HUGE_VAL);
  check_range("rope_original_max_position_embeddings",
              double(rope_original_max_position_embeddings), 1, HUGE_VAL);
  check_range("rope_low_freq_factor", rope_low_freq_factor, 0, HUGE_VAL);
  if (!(rope_high_freq_factor > rope_low_freq_factor) || !std::isfinite(rope_high_freq_factor)) {
    usage_error("rope_high_freq_factor={} must be above rope_low_freq_factor={}; try {}",
                rope_high_freq_factor, rope_low_freq_factor, 4 * rope_low_freq_factor + 1);
  }
}

}  // namespace usp
