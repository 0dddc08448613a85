#pragma once

#include <string>

#include "base/args.h"
#include "train/mla_shape.h"

namespace usp {

struct TrainConfig;

/// Which operations of the trainer are one where their parts would be several.
struct FusionConfig {
  static constexpr int64_t kLossRows = 512;  ///< unless the flag says otherwise

  std::string kernels = "reference";
  int64_t loss_rows = kLossRows;  ///< of the logits that are there at once

  /// Whether what can be fused is.
  bool fused() const { return kernels == "fused"; }

  /// For a twin of `run`, whose passes have few tokens: its loss has several chunks if the run's
  /// has.
  FusionConfig of_twin(const TrainConfig& run) const;

  /// The rank's device may take faster kernels from now on if fused(), and may not otherwise. It is
  /// told where latent attention's values end, so that kernels leave out the zeros behind them.
  void tell_device(const MlaShape& mla) const;

  void bind(Args& args);
  void validate(const Args& args) const;
  /// Throws UsageError where a flag has nothing to say; fused operations go with any layout.
  void check(const TrainConfig& run) const;
};

}  // namespace usp
