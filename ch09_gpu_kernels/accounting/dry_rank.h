#pragma once

#include "comm/mesh.h"
#include "config.h"
#include "model.h"
#include "tensor/runtime.h"

namespace usp {

/// A rank's part of a run of any size, of which it is the only rank: its place in the mesh, and the
/// model that it would build, on meta and without memory. While this lives, its runtime is the
/// current one.
struct DryRank {
  /// The rank of the world that has this number.
  DryRank(const TrainConfig& config, int rank)
      : dry(config.mesh(), config.engine(), rank, config.communication->node_size),
        // [view]
        view(config, dry.mesh),
        model(config, view) {
    view.load->allocate(config.model.experts.num_experts, parse_dtype(config.dtype));
  }
  // [view]
  DryRank(const DryRank&) = delete;
  DryRank& operator=(const DryRank&) = delete;

  const Mesh& mesh() const { return dry.mesh; }
  // [stage]
  int stage_rank() const { return dry.mesh.pp().rank(); }
  // [stage]

  Runtime runtime{Device::meta};
  Runtime::Use use{runtime};
  DryMesh dry;
  // [parts]
  RankView view;
  // [parts]
  Model model;
};

}  // namespace usp
