#include "rank_view.h"

namespace usp {

RankView::RankView(const TrainConfig& config, const Mesh& mesh) {
  // [mesh]
  region = TensorRegion(config.tensor_parallel, mesh.tp());
  context = ContextGroup(config.context_parallel, mesh.cp());
  blocks = blocks_of_rank(config, mesh.pp().rank());
  // [mesh]
}

}  // namespace usp
