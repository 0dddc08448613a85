#include "rank_view.h"

namespace usp {

RankView::RankView(const TrainConfig& config, const Mesh& mesh) {
  // [mesh]
  region = TensorRegion(config.tensor_parallel, mesh.tp());
  // [mesh]
}

}  // namespace usp
