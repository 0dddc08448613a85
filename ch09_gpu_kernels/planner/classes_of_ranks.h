#pragma once

#include <vector>

#include "planner/record.h"

namespace usp {

/// Ranks that do the same at the same times, so that one of them stands for all.
struct RankClasses {
  std::vector<int> of_rank;         ///< class of each rank of the world
  std::vector<int> representative;  ///< of each class, its first rank
  std::vector<int64_t> ranks;       ///< of each class
};

/// The classes of a run on nodes of `ranks_per_node`. Two ranks are in one class if they do the
/// same work, and if their groups lie on nodes alike and consist of ranks of the same classes.
RankClasses classes_of_ranks(const TrainConfig& config, int64_t ranks_per_node);
/// Each rank is a class of its own.
RankClasses each_for_itself(const TrainConfig& config);
/// The programs of the classes' representatives.
std::vector<Program> record_classes(const TrainConfig& config, const RankClasses& classes);

}  // namespace usp
