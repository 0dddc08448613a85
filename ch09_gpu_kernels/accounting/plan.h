#pragma once

#include <string>

#include "base/args.h"

namespace usp {

struct TrainConfig;

/// The flags of --plan.
struct PlanConfig {
  int64_t plan = 0;                ///< tokens of a global batch to be planned; 0: train
  bool micro_batch_given = false;  ///< the command line decides the micro-batch's size

  void bind(Args& args);
  void validate(const Args& args);
  void check(const TrainConfig&) const {}  ///< a plan is of any run
};

/// The book's recipe for a global batch over data-parallel ranks, as text: from tokens to samples,
/// to the largest micro-batch that fits, unless one is given, to the steps of gradient
/// accumulation. Playbook, section "Our journey up to now".
std::string plan_batch(TrainConfig config);

}  // namespace usp
