#pragma once

#include <vector>

#include "comm/mesh.h"
#include "config.h"
#include "data_parallel/strategy.h"
#include "rank_view.h"

namespace usp {

/// What a training step of a rank sends: each technique's operations beside its formula.
// [arguments]
std::vector<Traffic> traffic_of_step(const TrainConfig& config,
                                     const DataParallelStrategy& strategy, const Mesh& mesh,
                                     const RankView& view);
// [arguments]

}  // namespace usp
