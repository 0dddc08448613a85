#pragma once

#include <string>
#include <vector>

#include "proof/shrink.h"

namespace usp {

/// Loss and gradient norm of every step of a training run.
struct TrainedSeries {
  std::string what;  ///< the layout, or the order in which one process has added up the samples
  std::vector<double> losses, norms;
};

/// How far two runs are apart: relative differences, in the quadratic mean over the second half of
/// the steps. By then rounding has spread. In other orders of its samples one process has the same
/// first loss, because a sample's forward pass knows nothing of the others.
struct SeriesDistance {
  double loss = 0, norm = 0;
};
/// Distance between two runs with equally many steps.
SeriesDistance distance_of(const TrainedSeries& one, const TrainedSeries& other);

/// A layout that is more than this many times as far from one process as its orders are from each
/// other differs.
inline constexpr double kMostOfRounding = 2;

/// A layout in bf16 beside one process that has added up the same samples in five orders.
struct RoundingResult {
  TrainedSeries layout;
  std::vector<TrainedSeries> orders;
  SeriesDistance of_layout;  ///< from the nearest of the orders
  SeriesDistance of_orders;  ///< the largest between any two of them
  /// The larger of the ratios of these, of losses and norms: at most 1 where the layout lies among
  /// the orders. Up to kMostOfRounding may be rounding all the same: partial sums are rounded once
  /// more before ranks add them.
  double ratio = 0;
  std::string failure;  ///< what is wrong, in a line; empty: nothing
  double seconds = 0;
};

/// Fills in what the six runs of a result say: distances, ratio, and what is wrong, which also
/// covers runs with a loss or a norm that is no number, and orders that are all the same.
void judge(RoundingResult& result);

/// What a twin's flags are in bf16: without dropout, with micro-batches enough to be put in other
/// orders, and with gradients that are summed in bf16. Summed in f32, whose rounding is a 65,536th
/// of bf16's, an order makes no difference for dozens of steps, and is no measure of bf16. Throws
/// UsageError where its schedule has too few of them.
Twin in_bf16(const Twin& twin);

/// Trains a twin of in_bf16() on threads of this process, and its model on one, in five orders:
/// addition is associative but for rounding, so what lies between the orders is rounding. A layout
/// that is further from all of them than they are from each other computes something else.
RoundingResult compare_rounding(const Twin& twin);

/// All six runs, as a table, and how far they are apart.
std::string table_of(const RoundingResult& result);

}  // namespace usp
