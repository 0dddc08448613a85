#pragma once

#include "config.h"
#include "planner/cluster.h"

namespace usp {

/// A step by the book's formulas, in seconds: no message hides another, and every product is as
/// fast as a large one.
struct ClosedForm {
  double computes = 0;  ///< all operations, over all ranks
  double bubble = 0;    ///< (p - 1) / (m v) of that
  double tensor = 0;    ///< tp's exchanges, on the critical path
  double data = 0;      ///< dp's, beyond what backward hides

  double step() const { return computes + bubble + tensor + data; }
};

/// What the formulas need of a model and its samples, in whichever layout.
struct ModelSize {
  explicit ModelSize(const TrainConfig& config);

  double flops_per_token;  ///< as the book counts them
  double parameters;
};

/// Closed form of a layout's step on this cluster.
ClosedForm closed_form(const TrainConfig& config, const Cluster& cluster, const ModelSize& size);
ClosedForm closed_form(const TrainConfig& config, const Cluster& cluster);  ///< of its own model

}  // namespace usp
