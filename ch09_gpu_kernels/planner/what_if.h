#pragma once

#include "planner/search.h"

namespace usp {

/// Searches twice, on the cluster and on the cluster with the changes that `what_if` names, and
/// puts the two answers side by side. Where the new number of ranks does not divide the batch, the
/// batch is the nearest that it divides. Exit code 3 where nothing fits the changed cluster, or
/// nothing is as required. Throws UsageError for a change that is none, and where nothing fits
/// before.
SearchAnswer what_if(const TrainConfig& config);

}  // namespace usp
