#pragma once

#include <string>

#include "data_parallel/strategy.h"
#include "run/plan.h"
#include "run/run_config.h"
#include "tensor_parallel/region.h"
#include "train/optimizer_config.h"

namespace usp {

/// Everything a run is a function of. Field = flag = the field's standard name.
struct TrainConfig : RunConfig {
  OptimizerConfig optimizer;

  std::string attention = "blockwise";
  std::string recompute = "none";
  std::string grad_accumulation = "f32";  ///< where dtype is bf16

  // [parts]
  DataParallelConfig data_parallel;
  PlanConfig planning;
  TensorParallelConfig tensor_parallel;

  TrainConfig() : RunConfig(USP_CHAPTER, /*several_ranks=*/CommConfig()) {}

  /// The parts that bring flags of their own.
  template <class Visit>
  void each_part(Visit visit) {
    visit(model);
    visit(optimizer);
    visit(checkpoints);
    visit(sample);
    visit(data_parallel);
    visit(planning);
    visit(tensor_parallel);
    visit(*communication);
  }
  // [parts]

  // [mesh]
  MeshSizes mesh() const override { return tensor_parallel.mesh(data_parallel.dp_size, model); }
  void spread_over(int64_t world_size, const Args& args) override {
    data_parallel.spread_over(world_size, mesh(), args);
  }
  int64_t samples_of_pass() const override { return micro_batch_size / tensor_parallel.halves(); }
  // [mesh]

  std::unique_ptr<RunConfig> fresh() const override { return std::make_unique<TrainConfig>(); }
  void bind(Args& args) override;
  void validate(const Args& args) override;
};

}  // namespace usp
