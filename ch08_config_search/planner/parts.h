#pragma once

#include <map>

#include "planner/cost.h"

namespace usp {

/// What one pass does in one part of a model: how often each kernel and each exchange.
struct PartWork {
  std::map<Kernel, double> kernels;
  std::map<Exchange, double> exchanges;
};

/// Forward and backward through one micro-batch.
struct Passes {
  PartWork forward, backward;
};

/// What a rank of a tensor-parallel group does in each part of a model, however many layers the
/// model has and however many ranks share its batch.
struct LayerClass {
  Passes embedding, layer, head;
  PartWork update;         ///< of all parameters of a model with two layers
  int64_t parameters = 0;  ///< of a rank of that
  double logits = 0;       ///< of a rank, in a micro-batch
  std::vector<ProgramGroup> groups;
};

/// From the record of a run with two layers, one micro-batch and one copy of the model.
LayerClass record_layer_class(const TrainConfig& config);
/// What tells the layer classes of two runs apart.
std::string layer_class_key(const TrainConfig& config);

/// Seconds of a LayerClass on a cluster.
struct PartSeconds {
  double embedding_forward = 0, embedding_backward = 0;
  double layer_forward = 0, layer_backward = 0;
  double head_forward = 0, head_backward = 0;
  double update_of_parameter = 0;
};

/// A part takes what its device computes and what its host launches, now one ahead, now the other:
/// together more than the longer of the two, and less than their sum. Exchanges come on top.
PartSeconds part_seconds(const LayerClass& layer_class, Cost& cost);

/// A step, from the seconds of its parts and the book's formulas for the rest.
struct StepOfParts {
  double stages = 0;     ///< m micro-batches in the slowest stage
  double bubble = 0;     ///< the other stages, once
  double messages = 0;   ///< between stages
  double gradients = 0;  ///< dp's exchanges, beyond what the last backward pass hides
  double update = 0;
  double constant = 0;  ///< of a framework

  double step() const { return stages + bubble + messages + gradients + update + constant; }
};

/// Step of a run whose layers are of the class with these seconds. A framework's `overlap` and
/// `step_ms` count; without one, backward hides all that it can.
StepOfParts step_of_parts(const TrainConfig& config, const PartSeconds& parts, Cost& cost);

}  // namespace usp
