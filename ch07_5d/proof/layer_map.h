#pragma once

#include <string>
#include <vector>

#include "tensor/shape.h"
#include "train_step.h"

namespace usp {

/// An operation or a message of a layer, as one rank carries it out.
struct LayerPoint {
  std::string phase;      ///< "forward", "backward" or "recompute"
  std::string operation;  ///< such as "linear_forward", or "all_gather over tp"
  std::string parameter;  ///< such as "self_attn.o_proj"; empty: none
  Shape taken;            ///< this rank's part of the parameter, or what a message sends
  Shape made;             ///< on this rank: what the operation makes, or what a message brings
  Shape whole;            ///< on all ranks together; without axes for buffers of several weights

  std::vector<std::string> tokens_over;    ///< axes of the mesh whose ranks have other tokens
  std::vector<std::string> features_over;  ///< other features, heads or experts
  std::vector<std::string> terms_over;     ///< other terms of a sum
  bool is_routed =
      false;  ///< its tokens are those that the router sends here: a dry run's are even

  bool operator==(const LayerPoint&) const = default;
};

/// What the first rank of the pipeline's middle stage does in its first micro-batch: all of a layer
/// (one with experts, if it has any), in order, but what only copies or counts, between the
/// messages from and to other stages. From a dry run. Throws UsageError where the sizes of the mesh
/// have no types.
std::vector<LayerPoint> map_layer(const TrainConfig& config);

/// The same as a table.
std::string table_of_layer(const TrainConfig& config);

/// Prints it, for `--mesh_show shapes`. Returns the exit code. Throws UsageError like map_layer().
int show_layer(const TrainConfig& config);

}  // namespace usp
