#pragma once

#include <chrono>

#include "comm/mesh.h"
#include "data.h"
#include "memory.h"
#include "metrics.h"
#include "model.h"
#include "optimizer.h"
#include "zero.h"

namespace usp {

/// Trains a model: one call of train_step() per optimizer step, then report() for what it measured.
class Trainer {
 public:
  /// Builds the model on the current runtime's device. On meta, `dataset` may be nullptr: batches
  /// then have a shape and no tokens.
  // [trainer]
  Trainer(const TrainConfig& config, const Dataset* dataset, const Mesh& mesh);
  // [trainer]

  /// Micro-batches forward and backward, then one update. Reads nothing back from the device.
  void train_step(int64_t step);
  /// Loss, norm and speed of the step just run: the one place that waits for the device.
  /// `peak_gflops` is what the model FLOPs utilisation refers to; 0: leave it out.
  StepMetrics report(int64_t step, double peak_gflops);
  /// Mean loss over the first eval_samples validation samples; NaN if there are none.
  double evaluate();

  /// All that train_step() changes, for checkpoints.
  TrainState state();
  Model& model() { return model_; }
  const Optimizer& optimizer() const { return optimizer_; }
  // [accessor]
  DataParallelStrategy& data_parallel() { return *data_parallel_; }
  // [accessor]

 private:
  enum class Split { train, validation };

  Pass take_batch(Split split, int64_t first_sample, int64_t num_samples) const;
  void forward_backward(const Pass& pass);

  TrainConfig config_;
  const Dataset* dataset_;
  Model model_;
  Grads grads_;
  Optimizer optimizer_;
  // [members]
  const Mesh& mesh_;
  std::unique_ptr<DataParallelStrategy> data_parallel_;
  Tensor loss_;  // [1] f64: the share of this rank's samples in the running step's loss
  // [members]
  int64_t tokens_ = 0;
  double flops_ = 0, recomputed_flops_ = 0;  // of the last step, on this rank
  std::chrono::steady_clock::time_point step_begin_;
};

/// Runs two steps on shapes alone, the second because the first has no optimizer states yet.
Simulation simulate(const TrainConfig& config);

}  // namespace usp
