#pragma once

#include "accounting/memory.h"
#include "comm/mesh.h"
#include "data_parallel/zero.h"
#include "files/data.h"
#include "model.h"
#include "optimizer.h"
#include "run/traffic.h"

namespace usp {

/// Trains a model: one call of train_step() per optimizer step, then report() for what it measured.
class Trainer : public TrainerBase {
 public:
  /// Builds the model on the current runtime's device.
  Trainer(const TrainConfig& config, const RunContext& context);

  void train_step(int64_t step) override;
  StepMetrics report(int64_t step, double peak_gflops) override;
  double evaluate() override;
  Tensor logits(const Pass& pass) override;
  ParameterList& parameters() override { return model_.parameters(); }
  TrainState state() override;
  ReportRows report_rows() override;

  Model& model() { return model_; }
  const Optimizer& optimizer() const { return optimizer_; }
  // [accessor]
  DataParallelStrategy& data_parallel() { return *data_parallel_; }
  // [accessor]

 protected:
  /// Tokens and targets of `num_samples` samples from `first_sample` on, and where they lie.
  Pass take_batch(Split split, int64_t first_sample, int64_t num_samples) const;
  // [forward_backward]
  /// Adds the samples' share of the loss, and of all gradients.
  void forward_backward(const Pass& pass);
  // [forward_backward]

  TrainConfig config_;
  // [region]
  RankView view_;
  // [region]
  Model model_;
  Grads grads_;
  Optimizer optimizer_;
  // [members]
  const Mesh& mesh_;
  std::unique_ptr<DataParallelStrategy> data_parallel_;
  TrafficCounter traffic_;
  Tensor loss_;  // [1] f64: of the running step, the share of this rank's samples
  // [members]
  const Dataset* dataset_;
  int64_t tokens_ = 0;
  double flops_ = 0;        // of the last step, on this rank
  int64_t step_begin_ = 0;  // in nanoseconds of the clock
};

}  // namespace usp
