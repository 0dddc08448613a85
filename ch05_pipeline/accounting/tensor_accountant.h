#pragma once

#include "accounting/dry_rank.h"
#include "accounting/memory.h"
#include "run/rank_classes.h"
#include "run/traffic.h"

namespace usp {

/// Bytes that all ranks together send over their groups of tp in a step, by operation.
struct TensorTraffic {
  int64_t all_reduce = 0;
  int64_t all_gather = 0;
  int64_t reduce_scatter = 0;

  int64_t total() const { return all_reduce + all_gather + reduce_scatter; }
};
/// With x the bytes of a micro-batch's residual stream, T H numbers, a block makes its t ranks send
///
/// |                                  | forward, backward | all      |
/// |----------------------------------|-------------------|----------|
/// | tensor parallelism               | 4, 4 (t-1) x      | 8 (t-1) x  |
/// | sequence parallelism, input kept | 4, 4 (t-1) x      | 8 (t-1) x  |
/// | the same, input gathered again   | 4, 6 (t-1) x      | 10 (t-1) x |
///
/// and full recomputation all of forward once more but the block's last reduction. The embedding
/// and the head add their edges, the loss three numbers a token, and the norms under sequence
/// parallelism their gradients, once a step.
TensorTraffic predict_tensor_traffic(const TrainConfig& config);

/// What this rank sends over tp in a step, of any kind.
Traffic traffic_of(const TensorParallelConfig& part, const TrainConfig& config, const DryRank& dry);

/// A rank's words of the vocabulary: some ranks of tp have one more, where they do not divide.
RankTrait vocabulary_trait(const TrainConfig& config);
/// A rank of tp, where tp cuts what it does not divide: there its ranks differ.
RankTrait cut_trait(const TrainConfig& config);
/// What tensor parallelism makes of a prediction for a rank that has whole layers: scratch of the
/// reductions over tp, and the book's states and activations.
void shard_layers(const TrainConfig& config, const TensorRegion& region, Prediction& prediction);
/// The book's formula for activations of a rank of t: L s b h (10 + 24/t) bytes, 34/t with sequence
/// parallelism, and the probabilities' 5 n_heads s / h divided by t. Korthikanti et al. (2022),
/// https://arxiv.org/abs/2205.05198.
double book_sharded_activations(const TrainConfig& config);

}  // namespace usp
