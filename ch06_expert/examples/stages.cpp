// What each stage of a pipeline with experts holds, category by category, by a dry run of
// every one: --estimate adds the categories up.

#include "comm/launch.h"
#include "run/session.h"
#include "train_step.h"

namespace usp {
namespace {

int run(const Communicator& world, int argc, char** argv) {
  TrainConfig config;
  Session session(config, world);
  if (!session.parse(argc, argv)) return 0;
  if (!config.estimate) usage_error("the example takes no step with data; add --estimate");
  std::string text = fmt::format("{:>5} {:>15} {:>15} {:>15} {:>16} {:>15}\n", "stage", "weights",
                                 "gradients", "optimizer", "peak_activations", "peak_total");
  const int64_t pp_size = config.pipeline.pp_size;
  for (int64_t stage = 0; stage < pp_size; ++stage) {
    // The ranks of a stage have numbers in a row.
    const Simulation found =
        simulate<Trainer>(config, int(stage * (config.mesh().ranks() / pp_size)));
    text += fmt::format("{:>5} {:>15} {:>15} {:>15} {:>16} {:>15}\n", stage, found.states.weights,
                        found.states.gradients, found.states.optimizer, found.peak_activations,
                        found.peak);
  }
  return session.answer(text);
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_ranks_main(usp::run, argc, argv); }
