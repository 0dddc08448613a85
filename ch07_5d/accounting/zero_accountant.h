#pragma once

#include <vector>

#include "accounting/memory.h"
#include "accounting/zero_walk.h"
#include "data_parallel/strategy.h"

namespace usp {

/// Ranks that shard one copy of the model.
int64_t shard_size(const TrainConfig& config);
/// Ranks that shard one copy of some weights, among the ranks that hold `copies` of them.
int64_t shard_size(const TrainConfig& config, int64_t copies);

/// What the stage of ZeRO makes of a prediction for a rank that keeps everything whole: other
/// states, and buffers of communication.
void shard_states(const TrainConfig& config, DryRank& dry, Prediction& prediction);
/// What lasts from step to step on a rank of these shapes, under any stage.
StateBytes sharded_states(const TrainConfig& config, const ZeroShapes& shapes);
/// What comes and goes within a step there, kind by kind at its peak, under any stage.
std::vector<LiveBytes> zero_buffers(const TrainConfig& config, const ZeroShapes& shapes);
/// The book's table: 2, 2 and 12 bytes a parameter, each divided where its stage divides it, and 4
/// more for sums of gradients in f32.
double book_sharded_states(const TrainConfig& config);

/// Bytes that a rank and all that sum gradients with it send together in a step, by operation.
/// Scalars are not in it.
struct ZeroTraffic {
  int64_t reduce_scatter = 0;  ///< gradients
  int64_t all_gather = 0;      ///< weights
  int64_t all_reduce = 0;      ///< gradients: of all (stage 0), or of shards over copies

  int64_t total() const { return reduce_scatter + all_gather + all_reduce; }
};
/// What a step of this run sends, by the formulas of its stage.
ZeroTraffic predict_traffic(const TrainConfig& config, int rank = 0);

/// The gradients and weights that this rank sends in a step, in any stage.
Traffic data_parallel_traffic(const TrainConfig& config, const DataParallelStrategy& strategy);

}  // namespace usp
