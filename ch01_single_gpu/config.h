#pragma once

#include <string>

#include "run/run_config.h"
#include "train/optimizer_config.h"

namespace usp {

/// Everything a run is a function of. Field = flag = the field's standard name.
struct TrainConfig : RunConfig {
  OptimizerConfig optimizer;

  std::string attention = "blockwise";
  std::string recompute = "none";
  std::string grad_accumulation = "f32";  ///< where dtype is bf16

  // [parts]
  TrainConfig() : RunConfig(USP_CHAPTER) {}

  /// The parts that bring flags of their own.
  template <class Visit>
  void each_part(Visit visit) {
    visit(model);
    visit(optimizer);
    visit(checkpoints);
    visit(sample);
  }
  // [parts]

  std::unique_ptr<RunConfig> fresh() const override { return std::make_unique<TrainConfig>(); }
  void bind(Args& args) override;
  void validate(const Args& args) override;
};

}  // namespace usp
