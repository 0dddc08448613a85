#include "rank_view.h"

namespace usp {

RankView::RankView(const TrainConfig& config, const Mesh& mesh) {
  // [mesh]
  region = TensorRegion(config.tensor_parallel, mesh.tp());
  context = ContextGroup(config.context_parallel, mesh.cp());
  // [mesh]
}

}  // namespace usp
