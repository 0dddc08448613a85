#pragma once

#include <string>

#include "accounting/plan.h"
#include "composition/composition.h"
#include "context_parallel/group.h"
#include "data_parallel/strategy.h"
#include "expert_parallel/group.h"
#include "pipeline_parallel/stages.h"
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

  TrainConfig() : RunConfig(USP_CHAPTER) {
    communication.emplace();  // there may be several ranks
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
    visit(*communication);
  }
  // [parts]

  // [batch_size]
  int64_t global_batch_size() const override {
    return micro_batch_size * grad_acc_steps * data_parallel.dp_size;
  }
  /// All ranks split a batch's samples, unless the command line says otherwise.
  void spread_over(int64_t world_size, const Args& args) override {
    if (args.given("dp_size")) return;
    data_parallel.dp_size = std::max<int64_t>(1, world_size / mesh().ranks_of_a_copy());
  }
  // [batch_size]
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
  // [mesh]

  std::unique_ptr<RunConfig> fresh() const override { return std::make_unique<TrainConfig>(); }
  void bind(Args& args) override;
  void validate(const Args& args) override;
};

}  // namespace usp
