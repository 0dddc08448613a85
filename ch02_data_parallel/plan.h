#pragma once

#include <string>

#include "args.h"

namespace usp {

struct TrainConfig;

struct PlanConfig {
  int64_t plan = 0;         ///< tokens of a global batch to be planned; 0: train
  double plan_memory = 80;  ///< GiB of a rank

  void bind(Args& args);
  void validate(const Args& args) const;
};

/// The book's recipe for a global batch over data-parallel ranks, as text: from tokens to samples,
/// to the largest micro-batch that fits (`micro_batch_fixed`: the configuration's), to the steps of
/// gradient accumulation. Playbook, section "Our journey up to now".
std::string plan_batch(TrainConfig config, bool micro_batch_fixed);

}  // namespace usp
