#pragma once

#include "accounting/zero_accountant.h"
#include "config.h"
#include "data_parallel/strategy.h"
#include "pipeline_parallel/executor.h"
#include "run/estimate.h"
#include "run/rank_classes.h"
#include "run/traffic.h"
#include "train/fold.h"

namespace usp {

/// What is alive on a rank for each micro-batch in flight, besides what its blocks keep.
struct StageBytes {
  int64_t pass = 0;      ///< tokens, targets, documents
  int64_t boundary = 0;  ///< what one stage hands to the next
};

/// The most activations that are alive on a rank at a time: the schedule, walked through. `chunks`:
/// what each of its chunks asks for. Where passes run in turns it is a bound: both may need the
/// most at once.
int64_t peak_bytes_of_schedule(const Schedule& schedule, int rank,
                               const std::vector<PassBytes>& chunks, const StageBytes& bytes);
/// Adds what of other stages is there when a rank's first forward pass ends: the x that it read,
/// and tensors of receives that were posted an action ahead.
void add_bytes_from_stages(const Schedule& schedule, int rank, const StageBytes& bytes,
                           std::vector<LiveBytes>& saved);

/// The stage that a rank is.
RankTrait stage_trait();
/// The trait where a stage has an end of the model, reads words or predicts them; 0 elsewhere.
RankTrait at_ends(const TrainConfig& config, RankTrait trait);
/// A step's work of a rank of the pipeline, as the formulas of ZeRO read it.
std::vector<ChunkPass> passes_of_schedule(const TrainConfig& config, int stage_rank);
/// For counts of operations, each chunk of a rank as a model: its layers, and the vocabulary if it
/// has the head.
std::vector<ModelConfig> chunk_models(const TrainConfig& config, int stage_rank);
/// For the same counts, a rank's share of the tokens that a step takes through a chunk.
double tokens_of_a_chunk(const TrainConfig& config);

/// Bytes that all ranks send to other stages in a step of training: activations one way, their
/// gradients the other, for each micro-batch and boundary.
int64_t predict_pipeline_traffic(const TrainConfig& config);

/// What this rank sends to other stages in a step.
Traffic traffic_of(const PipelineConfig& part, const TrainConfig& config, const DryRank& dry);

/// For the report: what a stage's work took on this rank, as --pp_times wants it, and how much of
/// a step it idled, beside what the schedule says with these times.
std::pair<std::string, std::string> measured_work_row(const TrainConfig& config,
                                                      const MeasuredWork& measured);

}  // namespace usp
