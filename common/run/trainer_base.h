#pragma once

#include <string>
#include <utility>
#include <vector>

#include "comm/mesh.h"
#include "files/data.h"
#include "run/metrics.h"
#include "train/checkpoint.h"
#include "train/pass.h"

namespace usp {

/// Lines of a run's report: what, value.
using ReportRows = std::vector<std::pair<std::string, std::string>>;

/// What a Session gives a chapter's Trainer, besides the configuration.
struct RunContext {
  const Dataset* dataset;  ///< on meta perhaps nullptr: batches then have a shape and no tokens
  const Mesh& mesh;        ///< the ranks that train together, of which this is one
};

/// What a Session asks of a chapter's Trainer.
class TrainerBase {
 public:
  virtual ~TrainerBase() = default;

  /// Micro-batches forward and backward, then one update. Reads nothing back from the device.
  virtual void train_step(int64_t step) = 0;
  /// Loss, norm and speed of the step just run: the one place that waits for the device.
  /// `peak_gflops` is what the model FLOPs utilisation refers to; 0: leave it out.
  virtual StepMetrics report(int64_t step, double peak_gflops) = 0;
  /// Mean loss over the first eval_samples validation samples; NaN if there are none.
  virtual double evaluate() = 0;
  /// The logits that a sample is drawn from.
  virtual Tensor logits(const Pass& pass) = 0;

  virtual ParameterList& parameters() = 0;  ///< those of this rank
  /// All that train_step() changes, for checkpoints.
  virtual TrainState state() = 0;
  /// What the steps so far used, beside what the formulas say.
  virtual ReportRows report_rows() = 0;
};

}  // namespace usp
