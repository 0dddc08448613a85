#include "rank_view.h"

#include "expert_parallel/node_dispatch.h"

namespace usp {

RankView::RankView(const TrainConfig& config, const Mesh& mesh) {
  // [mesh]
  region = TensorRegion(config.tensor_parallel, mesh.tp());
  context = ContextGroup(config.context_parallel, mesh.cp());
  blocks = blocks_of_rank(config, mesh.pp().rank());
  experts = ExpertGroup(config.expert_parallel, mesh);
  load = std::make_shared<ExpertLoad>(config.expert_parallel, workers_of_stages(config, mesh));
  // [mesh]
}

}  // namespace usp
