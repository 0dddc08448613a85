#include "files/rope_scaling.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace usp {

namespace {

constexpr double kTurn = 2 * std::numbers::pi;

/// Factor by which yarn makes queries and keys larger for a context this many times longer.
double yarn_amplitude(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

}  // namespace

double RopeScaling::frequency(double theta, int64_t pair, int64_t rotary_dim) const {
  const double frequency = std::pow(theta, -2.0 * double(pair) / double(rotary_dim));
  if (rope_type == "default") return frequency;
  if (rope_type == "linear") return frequency / rope_factor;
  if (rope_type == "llama3") return blended(frequency);
  const double first = std::max(0.0, std::floor(pair_of(rope_beta_fast, theta, rotary_dim)));
  const double last =
      std::min(double(rotary_dim - 1), std::ceil(pair_of(rope_beta_slow, theta, rotary_dim)));
  const double width = last == first ? 0.001 : last - first;
  const double stretched = std::clamp((double(pair) - first) / width, 0.0, 1.0);
  return stretched * frequency / rope_factor + (1 - stretched) * frequency;
}

double RopeScaling::blended(double frequency) const {
  // Waves that fit into the original context.
  const double waves = double(rope_original_max_position_embeddings) * frequency / kTurn;
  const double kept =
      (waves - rope_low_freq_factor) / (rope_high_freq_factor - rope_low_freq_factor);
  if (kept <= 0) return frequency / rope_factor;
  if (kept >= 1) return frequency;
  return kept * frequency + (1 - kept) * frequency / rope_factor;
}

double RopeScaling::pair_of(double times, double theta, int64_t rotary_dim) const {
  const double wavelength = double(rope_original_max_position_embeddings) / times;
  return double(rotary_dim) * std::log(wavelength / kTurn) / (2 * std::log(theta));
}

double RopeScaling::amplitude() const {
  if (rope_type != "yarn") return 1;
  if (rope_mscale == 0 || rope_mscale_all_dim == 0) return yarn_amplitude(rope_factor, 1);
  return yarn_amplitude(rope_factor, rope_mscale) /
         yarn_amplitude(rope_factor, rope_mscale_all_dim);
}

double RopeScaling::score_factor() const {
  if (rope_type != "yarn" || rope_mscale_all_dim == 0) return 1;
  const double amplitude = yarn_amplitude(rope_factor, rope_mscale_all_dim);
  return amplitude * amplitude;
}

void RopeScaling::bind(Args& args) {
  args.bind("rope_type", rope_type, {"default", "linear", "llama3", "yarn"},
            "how RoPE reaches beyond the context it was trained on");
  args.bind("rope_factor", rope_factor, "times longer (all but rope_type default)");
  args.bind("rope_low_freq_factor", rope_low_freq_factor,
            "llama3: waves that fit fewer times into the original context are stretched");
  args.bind("rope_high_freq_factor", rope_high_freq_factor,
            "llama3: waves that fit more often are kept");
  args.bind("rope_beta_fast", rope_beta_fast,
            "yarn: waves that fit more often into the original context are kept");
  args.bind("rope_beta_slow", rope_beta_slow, "yarn: waves that fit fewer times are stretched");
  args.bind("rope_mscale", rope_mscale,
            "yarn: makes rotated channels larger by 0.1 ln(factor) times this; 0: times 1");
  args.bind("rope_mscale_all_dim", rope_mscale_all_dim,
            "yarn: what of this all channels of latent attention have; 0: none");
  args.bind("rope_original_max_position_embeddings", rope_original_max_position_embeddings,
            "llama3 and yarn: the original context");
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
  constexpr double kMost = 1e6;
  check_range("rope_beta_slow", rope_beta_slow, 1e-6, kMost);
  if (!(rope_beta_fast > rope_beta_slow && rope_beta_fast <= kMost)) {
    usage_error("rope_beta_fast={} must be above rope_beta_slow={} and at most {}; try {}",
                rope_beta_fast, rope_beta_slow, kMost, 32 * rope_beta_slow);
  }
  check_range("rope_mscale", rope_mscale, 0, kMost);
  check_range("rope_mscale_all_dim", rope_mscale_all_dim, 0, kMost);
}

}  // namespace usp
