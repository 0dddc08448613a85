#pragma once

#include "testing.h"
#include "train_step.h"

namespace usp::test {

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
  SoloTrainer(const TrainConfig& config, const Dataset* dataset)
      : Trainer(config, {dataset, mesh}) {}
};

/// Bytes that an allocation adds or a release takes away, and what they are spent on.
using Events = std::vector<std::pair<int64_t, Category>>;

/// Allocations and releases of a trainer's construction and first steps, workspace aside: what a
/// kernel needs for itself is the device's own business.
inline Events events_of(const TrainConfig& config, const Dataset& dataset, Device device) {
  OnDevice on(device);
  on.allocator().record_events(true);
  SoloTrainer trainer(config, &dataset);
  trainer.train_step(0);
  trainer.train_step(1);
  on.allocator().record_events(false);
  Events events;
  for (const Allocator::Event& event : on.allocator().events()) {
    if (event.tag.category != Category::workspace)
      events.emplace_back(event.bytes, event.tag.category);
  }
  return events;
}

}  // namespace usp::test
