#pragma once

#include <string>
#include <vector>

#include "run/run_config.h"
#include "run/trainer_base.h"
#include "tensor/ledger.h"
#include "tensor/memory_profile.h"
#include "tensor/runtime.h"

namespace usp {

/// Bytes of what lasts from step to step, from the number of parameters alone. Playbook: memory for
/// weights, gradients and optimizer states.
struct StateBytes {
  int64_t weights;
  int64_t gradients;
  int64_t optimizer;  ///< two moments of each weight, and its master where weights are bf16

  int64_t total() const { return weights + gradients + optimizer; }
};

/// What a chapter's formulas say of a training step on this rank, in bytes and operations.
struct Prediction {
  int64_t parameters = 0;          ///< of the whole model
  StateBytes states{};             ///< after the first step
  std::vector<LiveBytes> saved;    ///< activations between forward and backward
  int64_t peak_activations = 0;    ///< the most that is alive at a time
  std::vector<LiveBytes> buffers;  ///< of communication, each at its peak
  double flops = 0;                ///< needed; of attention the pairs that the mask lets through
  double recomputed_flops = 0;     ///< done again
  double book_flops = 0;           ///< as the book counts the needed ones: no causal mask
  double book_states = 0, book_activations = 0;
  int64_t rank = 0;       ///< of the world, which all of this is about
  std::string execution;  ///< the flags that decide what is kept, for the heading

  int64_t saved_bytes() const;  ///< of all that is saved
  int64_t needed() const;       ///< of states, peak activations and buffers together
};

/// What two training steps asked of memory.
struct Simulation {
  StateBytes states;               ///< alive after the second step
  std::vector<LiveBytes> saved;    ///< activations after the second forward pass
  std::vector<LiveBytes> buffers;  ///< of communication, each at its peak
  int64_t peak_activations;
  int64_t peak, reserved;          ///< without the workspace that a device's kernels want
  double flops, recomputed_flops;  ///< of a step
  Ledger sent;                     ///< in all of the steps
  int64_t steps;                   ///< of them

  int64_t saved_bytes() const;  ///< of all that is saved
};
/// What the current runtime counted in this many steps, which it recorded.
Simulation make_simulation(int64_t steps);

/// The same of a trainer on meta, which takes two steps: the first has no optimizer states yet.
Simulation simulate_steps(TrainerBase& trainer);
/// The same of the Trainer that this rank of the world would have: a dry run, where nothing is
/// sent.
template <class Trainer, class Config>
Simulation simulate(const Config& config, int rank = 0) {
  Runtime runtime(Device::meta);
  const Runtime::Use use(runtime);
  const int64_t node_size = config.communication ? config.communication->node_size : 0;
  const DryMesh dry(config.mesh(), config.engine(), rank, node_size);
  Trainer trainer(config, RunContext{/*dataset=*/nullptr, dry.mesh});
  return simulate_steps(trainer);
}

/// What a step asks for on a rank, which stands for all that have the same shapes.
struct RankEstimate {
  Prediction prediction;
  Simulation simulation;
  int64_t ranks = 1;      ///< that have these shapes
  std::string what = {};  ///< what tells them from the others
};

/// Formulas beside what a simulated step asked for, as a table, on the rank whose peak is highest;
/// where there are several ranks, the bytes that it sends over each kind of link; and of each rank
/// that is unlike the others, what it asks for.
std::string estimate_text(const RunConfig& config, const std::vector<RankEstimate>& ranks);
/// As JSON the same of the first rank, what each of the others asks for, and which is the fullest.
std::string estimate_json(const std::string& config_json, const MeshSizes& mesh,
                          const std::vector<RankEstimate>& ranks);

/// Rows of a run's report: what it used beside what the formulas say.
ReportRows prediction_rows(const Prediction& prediction);

}  // namespace usp
