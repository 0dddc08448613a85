#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "config.h"
#include "memory_profile.h"

namespace usp {

/// Bytes of what lasts from step to step, from the number of parameters alone. Playbook: memory for
/// weights, gradients and optimizer states.
struct StateBytes {
  int64_t weights;
  int64_t gradients;
  int64_t optimizer;  ///< two moments, and the masters of weights that are not their own

  int64_t total() const { return weights + gradients + optimizer; }
};

int64_t num_parameters(const ModelConfig& config);
/// Of a rank that holds all of the model.
StateBytes whole_states(const TrainConfig& config);
/// Of a rank of this run.
StateBytes predict_states(const TrainConfig& config);
/// What comes and goes within a step of such a rank so that ranks can exchange it: every buffer, by
/// its name, at its peak.
std::vector<LiveBytes> predict_buffers(const TrainConfig& config);

/// What the forward pass of one micro-batch leaves for backward, tensor by tensor.
std::vector<LiveBytes> predict_activations(const TrainConfig& config);
/// The floating-point operations of one step: needed, and done again by recomputation. Of attention
/// only the pairs that the causal mask lets through.
std::pair<double, double> predict_flops(const TrainConfig& config);

/// The book's formula for activations, of a GPT in mixed precision: L s b h (34 + 5 n_heads s / h)
/// bytes, without the second term under selective and 2 instead of the bracket under full
/// recomputation. Korthikanti et al. (2022).
double book_activations(const TrainConfig& config);
/// The book's formula for weights, gradients and optimizer states, of a rank of this run.
double book_states(const TrainConfig& config);
/// The same of a rank that holds all: 16 bytes a parameter, 20 with gradients summed in f32.
double book_whole_states(const TrainConfig& config);

/// What two training steps asked of memory.
struct Simulation {
  StateBytes states;               ///< alive after the second step
  std::vector<LiveBytes> saved;    ///< activations after the second forward pass
  std::vector<LiveBytes> buffers;  ///< of communication, each at its peak
  int64_t peak_activations;
  int64_t peak, reserved;          ///< without the workspace that a device's kernels want
  double flops, recomputed_flops;  ///< of a step

  int64_t saved_bytes() const;
};
/// What the current runtime counted in so many steps, which it recorded.
Simulation make_simulation(int64_t steps);

/// Formulas beside what a simulated step asked for; as a table, and as JSON.
std::string estimate_text(const TrainConfig& config, const Simulation& simulation);
std::string estimate_json(const TrainConfig& config, const Simulation& simulation,
                          const std::string& config_json);

/// Rows of a run's report: what it used beside what the formulas say.
std::vector<std::pair<std::string, std::string>> memory_rows(const TrainConfig& config);

}  // namespace usp
