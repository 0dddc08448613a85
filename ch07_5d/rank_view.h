#pragma once

#include <memory>

#include "comm/mesh.h"
#include "config.h"
#include "context_parallel/group.h"
#include "expert_parallel/load.h"
#include "pipeline_parallel/stages.h"
#include "tensor_parallel/region.h"

namespace usp {

/// A rank's view of a run: what it splits with others while it computes, as its layers see it.
struct RankView {
  RankView() = default;  ///< of a rank that is alone
  /// View of this rank of the mesh, and on meta of any.
  RankView(const TrainConfig& config, const Mesh& mesh);

  // [view]
  TensorRegion region;   ///< shards its layers
  ContextGroup context;  ///< shards the tokens of a sample
  RankBlocks blocks;     ///< of the pipeline
  ExpertGroup experts;   ///< shards the experts of a layer
  /// Where the routers of its layers count.
  std::shared_ptr<ExpertLoad> load = std::make_shared<ExpertLoad>(ExpertConfig{});
  // [view]
};

}  // namespace usp
