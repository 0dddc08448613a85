#include "accounting/plan.h"

#include "accounting/distinct_ranks.h"

namespace usp {

std::string plan_batch(TrainConfig config) {
  const char* no_room =
      config.data_parallel.zero_stage < 3
          ? "more ranks help little, each holds the whole model: try --zero_stage 3"
          : "try more ranks, shorter sequences or --recompute full";
  return plan_batch(config, config.planning, {.ranks = "dp_size", .no_room = no_room},
                    [&] { return simulate_fullest(config).peak; });
}

}  // namespace usp
