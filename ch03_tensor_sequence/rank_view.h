#pragma once

#include "comm/mesh.h"
#include "config.h"
#include "tensor_parallel/region.h"

namespace usp {

/// A rank's view of a run: what it splits with others while it computes, as its layers see it.
struct RankView {
  RankView() = default;  ///< of a rank that is alone
  /// View of this rank of the mesh, and on meta of any.
  RankView(const TrainConfig& config, const Mesh& mesh);

  // [view]
  TensorRegion region;  ///< shards its layers
  // [view]
};

}  // namespace usp
