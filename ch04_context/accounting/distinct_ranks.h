#pragma once

#include "run/rank_classes.h"
#include "train_step.h"

namespace usp {

/// All ranks of a run, however many, without running any: those that hold and compute as much are
/// in one class, in the order of their first ranks. They still differ where slices do not divide,
/// such as those of a reduction's scratch; the first of a class has most.
std::vector<RankClass> distinct_ranks(const TrainConfig& config);

/// What the first rank of each class needs, by all formulas and in a dry run.
std::vector<RankEstimate> estimate_ranks(const TrainConfig& config);
/// What the rank that needs most memory needs, by all formulas.
Prediction predict_fullest(const TrainConfig& config);
/// The same in a dry run.
Simulation simulate_fullest(const TrainConfig& config);

}  // namespace usp
