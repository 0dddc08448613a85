#pragma once

#include <cstdint>
#include <string>

#include "base/args.h"

namespace usp {

/// How the rotary embedding's frequencies are changed for positions beyond those that a model was
/// first trained on. Flags carry Hugging Face's names with rope_ before them.
struct RopeScaling {
  std::string rope_type = "default";  ///< default: frequencies as they are
  double rope_factor = 8;             ///< all others: how many times longer
  // llama3 alone:
  double rope_low_freq_factor = 1;
  double rope_high_freq_factor = 4;
  // yarn alone:
  double rope_beta_fast = 32;
  double rope_beta_slow = 1;
  double rope_mscale = 0;
  double rope_mscale_all_dim = 0;
  // llama3 and yarn:
  int64_t rope_original_max_position_embeddings = 8192;

  /// In radians per position, of channel pair `pair` of `rotary_dim` / 2 with this base.
  ///
  /// `linear` divides every frequency by the factor (Chen et al., 2023,
  /// https://arxiv.org/abs/2306.15595). `llama3` does so for waves longer than
  /// original_max_position_embeddings / low_freq_factor positions, leaves those shorter than
  /// original_max_position_embeddings / high_freq_factor alone, and blends in between (Llama 3.1).
  /// `yarn` leaves waves alone that fit more than beta_fast times into the original context,
  /// stretches those that fit less than beta_slow times, and blends in between, in proportion to
  /// the number of the pair (Peng et al., 2023, https://arxiv.org/abs/2309.00071).
  double frequency(double theta, int64_t pair, int64_t rotary_dim) const;

  /// Factor of cosines and sines, and so of rotated queries and keys: `yarn` makes up for the
  /// flatter scores of long texts. Without mscale and mscale_all_dim 0.1 ln(factor) + 1; with both
  /// the ratio of what each makes of that, mscale 0.1 ln(factor) + 1 and so on.
  double amplitude() const;
  /// Factor of the scores of latent attention, in whose queries and keys the rotated channels are
  /// only some: with mscale_all_dim the square of what it makes of 0.1 ln(factor) + 1.
  double score_factor() const;

  void bind(Args& args);
  void validate() const;  ///< throws UsageError

  bool operator==(const RopeScaling&) const = default;

 private:
  double blended(double frequency) const;  ///< of llama3
  /// The number of the pair, and parts of one, whose wave fits this many times into the original
  /// context.
  double pair_of(double times, double theta, int64_t rotary_dim) const;
};

}  // namespace usp
