#pragma once

#include <algorithm>
#include <map>
#include <tuple>

#include "accounting/tensor_accountant.h"
#include "technique/case_cover.h"
#include "technique/data_parallel/zero_parity.h"

/// Training on a mesh of dp x tp ranks next to training on one rank, for any engine.
namespace usp::test {

/// A point in the space of layouts; strings and numbers as the flags have them.
struct TensorCase {
  int64_t tp, dp, num_kv_heads;
  const char* sequence;  ///< "off", or what gathered_input is
  bool tied;
  int64_t zero_stage;
  const char *recompute, *attention, *overlap;
  int64_t grad_acc_steps;
  double dropout = 0;
  int64_t all_heads = 8;  ///< three ranks split 12

  std::string name() const {
    return fmt::format(
        "tp {} dp {} kv {} of {} sequence {} tied {} stage {} recompute {} {} overlap {} x{} "
        "dropout {}",
        tp, dp, num_kv_heads, all_heads, sequence, tied, zero_stage, recompute, attention, overlap,
        grad_acc_steps, dropout);
  }
};

/// Bytes of the model's states: what the formula says, and what a dry run has.
inline void check_states(const Prediction& prediction, const Simulation& simulation) {
  CHECK(prediction.states.weights == simulation.states.weights);
  CHECK(prediction.states.gradients == simulation.states.gradients);
  CHECK(prediction.states.optimizer == simulation.states.optimizer);
}

constexpr int64_t kTensorBatch = 24;  ///< samples of a step, whatever the layout

/// Heads of 4 channels, and a vocabulary that nothing divides.
inline TrainConfig tensor_config(const TensorCase& c) {
  TrainConfig config = parity_config();
  config.model.hidden_size = 4 * c.all_heads;
  config.model.num_heads = c.all_heads;
  config.model.num_kv_heads = c.num_kv_heads;
  config.model.ffn_hidden_size = 24;
  config.model.vocab_size = 61;
  config.model.tie_word_embeddings = c.tied;
  config.seq_len = 8;
  config.attention = c.attention;
  config.recompute = c.recompute;
  config.grad_acc_steps = c.grad_acc_steps;
  config.micro_batch_size = kTensorBatch / c.dp / c.grad_acc_steps;
  config.data_parallel.dp_size = c.dp;
  config.data_parallel.zero_stage = c.zero_stage;
  TensorParallelConfig& tensor = config.tensor_parallel;
  tensor.tp_size = c.tp;
  tensor.sequence_parallel = c.sequence != std::string_view("off");
  if (tensor.sequence_parallel) tensor.gathered_input = c.sequence;
  tensor.tp_overlap = c.overlap;
  tensor.dropout = c.dropout;
  return config;
}

/// Cases among which every pair of values occurs, then so many at random.
inline std::vector<TensorCase> tensor_cases(size_t random) {
  const std::vector<int64_t> tp = {2, 4, 8}, kv_heads = {1, 2, 8};
  const std::vector<const char*> sequence = {"off", "again", "kept"};
  const std::vector<const char*> recompute = {"none", "selective", "full"};
  const std::vector<const char*> attention = {"naive", "blockwise"};
  const std::vector<const char*> overlap = {"none", "weight_grad", "chunks", "batch_halves"};
  const auto at = [&](const Point& p) {
    return TensorCase{tp[p[0]],      int64_t(1 + p[1]), kv_heads[p[2]],         sequence[p[3]],
                      p[4] == 1,     int64_t(p[5]),     recompute[p[6]],        attention[p[7]],
                      overlap[p[8]], p[9] == 0 ? 1 : 3, p[10] == 0 ? 0.0 : 0.25};
  };
  std::vector<TensorCase> cases;
  for (const Point& point : cover_pairs({3, 2, 3, 3, 2, 4, 3, 2, 4, 2, 2}, random)) {
    cases.push_back(at(point));
  }
  return cases;
}

/// Elements of a whole tensor that lie in this rank's shard of the parameter.
inline std::vector<double> shard_of(const std::vector<double>& whole, const Parameter& parameter) {
  std::vector<double> part;
  const Shape shape = parameter.local_shape();
  for (int64_t i = parameter.shard.begin; i < parameter.shard.end; ++i) {
    part.push_back(whole[parameter.global_index(i, shape)]);
  }
  return part;
}

/// Throws Error unless max|a - part of b| <= tolerance max|b|, where b is the whole tensor.
inline void expect_part(const Tensor& a, const std::vector<double>& whole,
                        const Parameter& parameter, double tolerance, const std::string& what) {
  const std::vector<double> values = a.items(), part = shard_of(whole, parameter);
  USP_CHECK(values.size() == part.size(), "{}: {} of {}", what, values.size(), part.size());
  double difference = 0, scale = 0;
  for (double value : whole) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < part.size(); ++i) {
    difference = std::max(difference, std::abs(values[i] - part[i]));
    if (std::isnan(values[i])) difference = HUGE_VAL;
  }
  USP_CHECK(difference <= tolerance * scale, "{}: off by {} of {}", what, difference, scale);
}

/// Trains so many steps and throws Error at the first difference from `expected`, on whichever rank
/// has it: copies of a weight are compared one by one.
inline void expect_same_training(Trainer& trainer, const TrainedState& expected, double tolerance,
                                 const Communicator& world, const std::string& what) {
  for (size_t step = 0; step < expected.losses.size(); ++step) {
    trainer.train_step(static_cast<int64_t>(step));
    const StepMetrics metrics = trainer.report(static_cast<int64_t>(step), 0);
    expect_close({metrics.loss}, {expected.losses[step]}, tolerance, what + ": loss");
    expect_close({metrics.grad_norm}, {expected.grad_norms[step]}, tolerance,
                 what + ": gradient norm");
  }
  const ParameterList& parameters = trainer.model().parameters();
  int64_t offset = 0, total = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const auto check = [&](const char* suffix, const Tensor& values, size_t which) {
      expect_part(values, expected.tensors[4 * i + which].values, parameter, tolerance,
                  what + ": " + parameter.name + suffix);
    };
    const auto part = [&](const Tensor& flat) {
      return flat.narrow(0, offset, parameter.shard.numel());
    };
    check(".grad", parameter.shard.grad, 0);
    check(".m", part(trainer.optimizer().first_moments()), 1);
    check(".v", part(trainer.optimizer().second_moments()), 2);
    check("", parameter.shard.master, 3);
    offset += parameter.shard.numel();
    total += parameter.global_shape.numel();
  }
  const double counted = world.sum(double(parameters.counted()));
  USP_CHECK(counted == double(total), "{}: {} elements counted, the model has {}", what, counted,
            total);
}

/// What all ranks have sent over tp.
inline TensorTraffic sent_over_tp(const Communicator& world) {
  const auto all = [&](CommKind kind) {
    return static_cast<int64_t>(
        world.sum(double(Runtime::current().ledger().get("tp", kind).wire_bytes)));
  };
  return {all(CommKind::all_reduce), all(CommKind::all_gather), all(CommKind::reduce_scatter)};
}

/// Throws Error unless the ranks have sent what predict_tensor_traffic() says of so many steps.
inline void check_tensor_traffic(const Communicator& world, const TrainConfig& config,
                                 const TensorTraffic& before, int64_t steps,
                                 const std::string& what) {
  const TensorTraffic after = sent_over_tp(world), predicted = predict_tensor_traffic(config);
  const auto check = [&](int64_t TensorTraffic::*kind, const char* operation) {
    const int64_t sent = after.*kind - before.*kind;
    USP_CHECK(sent == steps * predicted.*kind, "{}: {} bytes in {} over tp, {} predicted", what,
              sent, operation, steps * predicted.*kind);
  };
  check(&TensorTraffic::all_reduce, "all_reduce");
  check(&TensorTraffic::all_gather, "all_gather");
  check(&TensorTraffic::reduce_scatter, "reduce_scatter");
}

/// Training on one rank, by what decides its result.
class TensorReferences {
 public:
  TensorReferences(const Dataset& dataset, int64_t steps) : dataset_(dataset), steps_(steps) {}

  /// Needs a runtime of its own device on this thread.
  const TrainedState& of(TensorCase c) {
    const auto key = std::tuple(c.all_heads, c.num_kv_heads, c.tied, c.dropout);
    if (const auto found = states_.find(key); found != states_.end()) return found->second;
    c.tp = c.dp = c.grad_acc_steps = 1;
    c.sequence = "off";
    c.zero_stage = 0;
    c.recompute = "none";
    SoloTrainer solo(tensor_config(c), &dataset_);
    return states_[key] = train(solo, steps_);
  }

 private:
  const Dataset& dataset_;
  int64_t steps_;
  std::map<std::tuple<int64_t, int64_t, bool, double>, TrainedState> states_;
};

/// Trains the case over all ranks of `world`. Throws Error on the first difference from the
/// reference, and where a step sends other bytes than the formula says.
inline void check_tensor_parity(const Communicator& world, const TensorCase& c,
                                const Dataset& dataset, const TrainedState& expected) {
  const TrainConfig config = tensor_config(c);
  const Mesh mesh(world, config.mesh());
  Trainer trainer(config, {&dataset, mesh});
  const TensorTraffic before = sent_over_tp(world);
  const bool counts = mesh.tp().rank() == 0;  // the others may have a row of the vocabulary more
  const ZeroTraffic zero_before = sent_by_all(world, counts);
  expect_same_training(trainer, expected, 1e-10, world, c.name());
  check_tensor_traffic(world, config, before, std::ssize(expected.losses), c.name());
  check_zero_traffic(world, config, zero_before, std::ssize(expected.losses), c.name(), counts);
}

}  // namespace usp::test
