#pragma once

#include <string>

#include "composition/composition.h"
#include "context_parallel/group.h"
#include "data_parallel/strategy.h"
#include "expert_parallel/group.h"
#include "pipeline_parallel/stages.h"
#include "planner/search.h"
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
  ContextParallelConfig context_parallel;
  PipelineConfig pipeline;
  ExpertConfig expert_parallel;
  CompositionConfig composition;
  SearchConfig search;

  TrainConfig() : RunConfig(USP_CHAPTER, /*several_ranks=*/CommConfig()) {
    model.offers_latents = model.offers_experts = true;
  }

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
    visit(context_parallel);
    visit(pipeline);
    visit(expert_parallel);
    visit(composition);
    visit(search);
    visit(*communication);
  }
  // [parts]

  // [mesh]
  /// How many ranks each kind of parallelism uses.
  MeshSizes mesh() const override {
    MeshSizes sizes = tensor_parallel.mesh(data_parallel.dp_size, model);
    sizes.cp = context_parallel.cp_size;
    sizes.pp = pipeline.pp_size;
    sizes.ep = expert_parallel.ep_size;
    sizes.ep_over_tp = !expert_parallel.expert_tp;
    sizes.order = MeshOrder(composition.mesh_order);
    return sizes;
  }
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
