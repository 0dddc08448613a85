#pragma once

#include <string>
#include <vector>

#include "base/args.h"
#include "comm/mesh.h"
#include "pipeline_parallel/simulate_schedule.h"
#include "run/run_config.h"
#include "tensor_parallel/region.h"
#include "train/parameter.h"
#include "train/segment.h"

namespace usp {

struct TrainConfig;

/// Who holds which layers, and in which order they work.
struct PipelineConfig {
  int64_t pp_size = 1;  ///< ranks that split the layers
  std::string pp_schedule = "1f1b";
  int64_t pp_chunks = 1;      ///< model chunks of each rank
  int64_t pp_run_length = 0;  ///< of llama3: micro-batches in a row; 0: pp_size
  std::string pp_layers;      ///< of each stage, such as "3,5,4"; empty: split evenly
  int64_t pp_in_flight = 0;   ///< of auto: micro-batches on a rank at most; 0: pp_size
  /// Times of F, B, W and a message, for auto and pp_show; "measured": by the run's first steps.
  std::string pp_times = "1,1,1,0";
  bool overlap_dispatch = false;  ///< forward and backward passes run in turns
  std::string pp_show;            ///< print the schedule instead of training

  void bind(Args& args);
  void validate(const Args& args) const;
  /// Throws UsageError where the schedule cannot take the run's micro-batches, or there are fewer
  /// layers than stages.
  void check(const TrainConfig& run) const;
  /// With pp_times=measured: steps that do not count, and until when those that do last.
  static constexpr int64_t kWarmUpSteps = 1, kMeasuredUntil = 3;
  bool measures_times() const { return pp_times == "measured"; }  ///< as pp_times asks for
  WorkTimes times() const;  ///< pp_times; where they are yet to be measured, 1,1,1,0
  /// The schedule, laid out in time: as lines for a reader, or as JSON.
  std::string show(int64_t micro_batches) const;
  /// The schedule of a step of this many micro-batches.
  Schedule schedule(int64_t micro_batches) const;
  /// Whether there are two of every stage, each with gradients of its own to sum.
  bool mirrors(int64_t micro_batches) const {
    return schedule(micro_batches).stages.placement == Placement::mirror;
  }

 private:
  Schedule one_after_the_other(int64_t micro_batches) const;
};

// [stages]
/// Blocks of each stage: the embedding in the first, the head in the last, and the layers
/// split so that no stage has much more to compute than another.
std::vector<BlockRange> blocks_of_stages(const PipelineConfig& config, const ModelConfig& model,
                                         int64_t stages);
// [stages]

// [rank_blocks]
/// What a rank holds of the model.
struct RankBlocks {
  std::vector<BlockRange> chunks;
  /// Embedding and head lie on different ranks: if they are tied, each has a copy of their table.
  bool ends_apart = false;
};
// [rank_blocks]

/// Blocks of a rank of the pipeline.
RankBlocks blocks_of_rank(const TrainConfig& config, int stage_rank);

/// Marks each parameter that several stages hold: its gradients are summed over them, and it enters
/// the gradient norm, and checkpoints, on the first of them.
void share_copies(ParameterList& parameters, const Stages& stages, const Mesh& mesh);

}  // namespace usp
