#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "accounting/dry_rank.h"
#include "accounting/memory.h"
#include "data_parallel/strategy.h"
#include "train/fold.h"

namespace usp {

/// What is done in a row for one micro-batch in a chunk of this rank's blocks.
struct ChunkPass {
  int64_t chunk = 0;
  bool forward = true, backward = true;
  bool gradients = true;  ///< of weights, where the backward pass leaves off
};

/// A unit on paper.
struct UnitShape {
  int64_t numel;      ///< as padded to a multiple of Z
  int64_t held;       ///< as it is
  std::string group;  ///< over which its gradients are summed
  int64_t copies;     ///< ranks of the group
  int64_t ranks;      ///< Z of them shard one copy
  int64_t rank;       ///< this one, in the group

  int64_t shard() const { return numel / ranks; }
  /// What this rank of the group updates: its shard without the padding, which the last ones have.
  int64_t updated_by(int64_t which) const {
    return std::clamp<int64_t>(held - which % ranks * shard(), 0, shard());
  }
};
/// The units of a rank's model that has no memory, in the order of the parameters.
std::vector<UnitShape> unit_shapes(const TrainConfig& config, DryRank& dry);

/// Ranks that shard one copy of the model.
int64_t shard_size(const TrainConfig& config);
/// Ranks that shard one copy of some weights, among the ranks that hold `copies` of them.
int64_t shard_size(const TrainConfig& config, int64_t copies);

/// What the stage of ZeRO makes of a prediction for a rank that keeps everything whole: other
/// states, and buffers of communication. `chunks`: what fold_blocks() found of the rank's.
void shard_states(const TrainConfig& config, DryRank& dry, const std::vector<PassBytes>& chunks,
                  Prediction& prediction);
/// What lasts from step to step on a rank that holds these units, under any stage.
StateBytes sharded_states(const TrainConfig& config, const std::vector<UnitShape>& units);
/// What comes and goes within a step on a rank, kind by kind at its peak, under any stage: what
/// the run's own DataParallelStrategy asks for when blocks compute nothing.
std::vector<LiveBytes> data_parallel_buffers(const TrainConfig& config, int64_t rank,
                                             const std::vector<PassBytes>& chunks);
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
/// What a step of this run sends: gradients by the formulas of its stage, weights as often as its
/// passes gather them.
ZeroTraffic predict_traffic(const TrainConfig& config, int rank = 0);

/// The gradients and weights that this rank sends in a step, in any stage.
Traffic traffic_of(const DataParallelConfig& dp, const TrainConfig& config, const DryRank& dry);

}  // namespace usp
