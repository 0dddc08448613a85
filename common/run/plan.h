#pragma once

#include <functional>
#include <string>

#include "run/run_config.h"

namespace usp {

/// The flags of --plan.
struct PlanConfig {
  int64_t plan = 0;                ///< tokens of a global batch to be planned; 0: train
  bool micro_batch_given = false;  ///< the command line decides the micro-batch's size

  void bind(Args& args);
  void validate(const Args& args);
  void check(const RunConfig&) const {}  ///< a plan is of any run
};

/// What a plan says of flags that chapters bring.
struct PlanWords {
  std::string ranks;    ///< the flag of the ranks that split a batch
  std::string no_room;  ///< what may help where not even one sample fits
};

/// The book's recipe for a global batch over data-parallel ranks, as text: from tokens to samples,
/// to the largest micro-batch that fits, unless one is given, to the steps of gradient
/// accumulation. Tries sizes in `run`, of which peak() tells the bytes that a step needs. Playbook,
/// section "Our journey up to now".
std::string plan_batch(RunConfig& run, const PlanConfig& planning, const PlanWords& words,
                       const std::function<int64_t()>& peak);

}  // namespace usp
