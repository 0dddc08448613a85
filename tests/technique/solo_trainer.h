#pragma once

#include "train_step.h"

namespace usp::test {

#if __has_include("data_parallel.h")

/// A world of one rank, without threads or messages.
struct OneRank {
  OneRank() : engine(0, 1), world(Communicator::world(engine)), mesh(world, sizes) {}

  DryEngine engine;
  Communicator world;
  MeshSizes sizes;
  Mesh mesh;
};

/// A trainer that is alone in its world.
class SoloTrainer : private OneRank, public Trainer {
 public:
  SoloTrainer(const TrainConfig& config, const Dataset* dataset) : Trainer(config, dataset, mesh) {}
};

#else

using SoloTrainer = Trainer;

#endif

}  // namespace usp::test
