#pragma once

#include <cstdint>
#include <string>

#include "base/args.h"

namespace usp {

/// How the rotary embedding's frequencies are changed for positions beyond those that a model was
/// first trained on. Flags carry Hugging Face's names with rope_ before them.
struct RopeScaling {
  std::string rope_type = "default";  ///< default: frequencies as they are
  double rope_factor = 8;             ///< linear and llama3: how many times longer
  // llama3 alone:
  double rope_low_freq_factor = 1;
  double rope_high_freq_factor = 4;
  int64_t rope_original_max_position_embeddings = 8192;

  /// A channel pair's frequency, in radians per position -> the scaled one. `linear` divides every
  /// frequency by the factor (Chen et al., 2023). `llama3` does so for waves longer than
  /// original_max_position_embeddings / low_freq_factor positions, leaves those shorter than
  /// original_max_position_embeddings / high_freq_factor alone, and blends in between (Llama 3.1).
  double scaled(double frequency) const;

  void bind(Args& args);
  void validate() const;  ///< throws UsageError
};

}  // namespace usp
