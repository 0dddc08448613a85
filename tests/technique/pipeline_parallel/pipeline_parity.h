#pragma once

#include <fmt/ranges.h>

#include "accounting/pipeline_accountant.h"
#include "comm/launch.h"
#include "pipeline_parallel/generators.h"
#include "technique/tensor_parallel/tensor_parity.h"
#include "technique/tiny_llama.h"
#include "testing.h"

/// Training on a mesh of pp x dp x cp x tp ranks next to training on one rank.
namespace usp::test {

/// Random tokens, cut into samples of eight.
struct Text {
  Text() : tokens(parity_config().model.vocab_size), file(tokens.path(), 2, 61) {}

  RandomTokens tokens;
  TokenFile file;
  Dataset dataset{file, 8, 0.1, DataOrder::shuffled, 0};
};

/// A point in the space of layouts; strings and numbers as the flags have them.
struct PipelineCase : TensorCase {
  int64_t pp = 1, chunks = 1;
  std::string schedule = "1f1b";  ///< or a file
  bool uneven = false;            ///< of first and last stage one has two layers, the other none
  int64_t cp = 1;
  int64_t stages = 0;  ///< of a file; 0: what the schedule has
  const char *reduce_after = "micro_batch", *reshard_after = "block";  ///< of ZeRO
  bool in_turns = false;                                               ///< overlap_dispatch

  int64_t ranks() const { return pp * cp * tp * dp; }
  /// As many as there are stages, and one more where nothing else decides that.
  int64_t num_layers() const { return stages > 0 ? stages : count_stages() + (uneven ? 0 : 1); }
  int64_t count_stages() const {
    if (stages > 0) return stages;
    if (schedule == "zb_v" || schedule == "dualpipe_v") return 2 * pp;
    return schedule == "dualpipe" ? pp : pp * chunks;
  }
  /// For pp_layers.
  std::string layers() const {
    std::vector<int64_t> of_stages(count_stages(), 1);
    of_stages.front() = pp % 2 == 0 ? 2 : 0;
    of_stages.back() = pp % 2 == 0 ? 0 : 2;
    return fmt::format("{}", fmt::join(of_stages, ","));
  }
  std::string name() const {
    return fmt::format(
        "pp {} {} v {} uneven {} cp {} in turns {} reduces after {} reshards after {} {}", pp,
        schedule, chunks, uneven, cp, in_turns, reduce_after, reshard_after, TensorCase::name());
  }
};

/// Micro-batches of one sample of eight tokens.
inline TrainConfig pipeline_config(const PipelineCase& c) {
  TrainConfig config = tensor_config(c);
  config.model.hidden_size = 16;
  config.model.num_heads = 4;
  config.model.ffn_hidden_size = 12;
  config.model.num_layers = c.num_layers();
  config.micro_batch_size = 1;
  config.eval_samples = 7;
  config.optimizer.warmup_steps = 0;
  config.context_parallel.cp_size = c.cp;
  config.pipeline.pp_size = c.pp;
  config.pipeline.pp_schedule = c.schedule;
  config.pipeline.pp_chunks = c.chunks;
  config.pipeline.overlap_dispatch = c.in_turns;
  if (c.uneven) config.pipeline.pp_layers = c.layers();
  config.data_parallel.reduce_after = c.reduce_after;
  config.data_parallel.reshard_after = c.reshard_after;
  return config;
}

/// The case on one rank, with all samples at once.
inline TrainConfig alone_config(const PipelineCase& c) {
  PipelineCase one = c;
  one.pp = one.chunks = one.cp = one.tp = one.dp = one.grad_acc_steps = 1;
  one.schedule = "1f1b";
  one.uneven = one.in_turns = false;
  one.sequence = "off";
  one.zero_stage = 0;
  one.reduce_after = "micro_batch";
  one.reshard_after = "block";
  one.recompute = "none";
  one.overlap = "none";
  TrainConfig config = pipeline_config(one);
  config.model.num_layers = c.num_layers();
  config.micro_batch_size = c.grad_acc_steps * c.dp;
  return config;
}

/// Whether the case is one, on few ranks: interleaved with one chunk is 1f1b.
inline bool has_meaning(const PipelineCase& c) {
  if (c.ranks() > std::max<int64_t>(8, 2 * c.pp)) return false;
  if (c.schedule == "interleaved" && c.chunks == 1) return false;
  return goes_together(pipeline_config(c));
}

/// Cases among which every pair of values occurs, then so many at random.
inline std::vector<PipelineCase> pipeline_cases(size_t random) {
  const std::vector<int64_t> pp = {2, 3, 4, 8};
  const std::vector<const char*> schedule = {"naive",    "afab",       "1f1b",  "interleaved",
                                             "llama3",   "zb_h1",      "zb_h2", "zb_v",
                                             "dualpipe", "dualpipe_v", "auto"};
  const std::vector<const char*> sequence = {"off", "again", "kept"};
  const std::vector<const char*> recompute = {"none", "selective", "full"};
  const std::vector<const char*> overlap = {"none", "weight_grad", "chunks"};
  const std::vector<const char*> reshard = {"block", "chunk", "step"};
  const auto at = [&](const Point& p) {
    const int64_t ranks = pp[p[0]];
    const std::array<int64_t, 5> m = {1, 2, ranks - 1, 2 * ranks + 1, 2 * ranks};
    PipelineCase c{{int64_t(1 + p[1]), int64_t(1 + p[2]), int64_t(1 + p[3]), sequence[p[4]],
                    p[5] == 1, int64_t(p[6]), recompute[p[7]], p[8] == 0 ? "naive" : "blockwise",
                    overlap[p[9]], m[p[10]], p[11] == 0 ? 0.0 : 0.25}};
    c.pp = ranks;
    c.schedule = schedule[p[12]];
    c.chunks = int64_t(1 + p[13]);
    c.uneven = p[14] == 1;
    c.cp = int64_t(1 + p[15]);
    c.reduce_after = p[16] == 0 ? "micro_batch" : "step";
    c.reshard_after = reshard[p[17]];
    c.in_turns = p[18] == 1;
    return c;
  };
  std::vector<PipelineCase> cases;
  for (const Point& point :
       cover_pairs({4, 2, 2, 2, 3, 2, 4, 3, 2, 3, 5, 2, 11, 2, 2, 2, 2, 3, 2}, random,
                   [&](const Point& p) { return has_meaning(at(p)); })) {
    cases.push_back(at(point));
  }
  return cases;
}

/// What a run has come to, whatever its layout.
struct PipelineResult {
  TrainedState trained;
  double evaluation = 0;
};

/// Training on one rank, by what decides its result.
class PipelineReferences {
 public:
  PipelineReferences(const Dataset& dataset, int64_t steps) : dataset_(dataset), steps_(steps) {}

  const PipelineResult& of(const PipelineCase& c) {
    const auto key =
        std::tuple(c.num_layers(), c.grad_acc_steps * c.dp, c.num_kv_heads, c.tied, c.dropout);
    if (const auto found = results_.find(key); found != results_.end()) return found->second;
    const OnDevice cpu;
    SoloTrainer solo(alone_config(c), &dataset_);
    PipelineResult& result = results_[key];
    result.trained = train(solo, steps_);
    result.evaluation = solo.evaluate();
    return result;
  }

 private:
  const Dataset& dataset_;
  int64_t steps_;
  std::map<std::tuple<int64_t, int64_t, int64_t, bool, double>, PipelineResult> results_;
};

/// Throws Error at the first difference between a rank's parameters and those of the same names.
inline void expect_same_parameters(Trainer& trainer, const TrainedState& expected, double tolerance,
                                   const std::string& what) {
  std::map<std::string, const std::vector<double>*> by_name;
  for (const TrainedState::Named& tensor : expected.tensors) by_name[tensor.name] = &tensor.values;
  const ParameterList& parameters = trainer.model().parameters();
  int64_t offset = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const auto check = [&](const char* suffix, const Tensor& values) {
      const std::string name = parameter.name + suffix;
      USP_CHECK(by_name.contains(name), "{}: one rank has no {}", what, name);
      expect_part(values, *by_name[name], parameter, tolerance, what + ": " + name);
    };
    const auto part = [&](const Tensor& flat) {
      return flat.narrow(0, offset, parameter.shard.numel());
    };
    check(".grad", parameter.shard.grad);
    check(".m", part(trainer.optimizer().first_moments()));
    check(".v", part(trainer.optimizer().second_moments()));
    check("", parameter.shard.master);
    offset += parameter.shard.numel();
  }
}

/// What all ranks have sent to other stages.
inline int64_t sent_over_pp(const Communicator& world) {
  return static_cast<int64_t>(
      world.sum(double(Runtime::current().ledger().get("pp", CommKind::send).wire_bytes)));
}

/// Trains the case over all ranks of `world`. Throws Error on the first difference from the
/// reference, and where a step sends other bytes than the formula says.
inline void check_pipeline_parity(const Communicator& world, const PipelineCase& c,
                                  const Dataset& dataset, const PipelineResult& expected) {
  const TrainConfig config = pipeline_config(c);
  const Mesh mesh(world, config.mesh());
  Trainer trainer(config, {&dataset, mesh});
  const TrainedState& state = expected.trained;
  const int64_t before = sent_over_pp(world), steps = std::ssize(state.losses);
  // The formula is of the ranks that hold the same weights as rank 0.
  const bool counts = mesh.pp().rank() == 0 && mesh.tp().rank() == 0;
  const ZeroTraffic sent_before = sent_by_all(world, counts);
  for (int64_t step = 0; step < steps; ++step) {
    trainer.train_step(step);
    const StepMetrics metrics = trainer.report(step, 0);
    expect_close({metrics.loss}, {state.losses[step]}, 1e-10, c.name() + ": loss");
    expect_close({metrics.grad_norm}, {state.grad_norms[step]}, 1e-10,
                 c.name() + ": gradient norm");
  }
  expect_same_parameters(trainer, state, 1e-10, c.name());
  const int64_t sent = sent_over_pp(world) - before;
  USP_CHECK(sent == steps * predict_pipeline_traffic(config),
            "{}: {} bytes sent to other stages, {} predicted", c.name(), sent,
            steps * predict_pipeline_traffic(config));
  check_zero_traffic(world, config, sent_before, steps, c.name(), counts);
  const double counted = world.sum(double(trainer.model().parameters().counted()));
  USP_CHECK(counted == double(num_parameters(config.model)),
            "{}: {} elements counted, the model has {}", c.name(), counted,
            num_parameters(config.model));
  expect_close({trainer.evaluate()}, {expected.evaluation}, 1e-10, c.name() + ": evaluation");
}

/// Trains on ranks, each of which holds a stage. Throws Error where activations saved by its first
/// forward pass have other bytes than the formula says, or than the dry run.
inline void check_saved_bytes(const TrainConfig& config, const Dataset& dataset) {
  run_threads(static_cast<int>(config.mesh().pp), [&](const Communicator& world) {
    const Mesh mesh(world, config.mesh());
    Trainer trainer(config, {&dataset, mesh});
    const int64_t measured = simulate_steps(trainer).saved_bytes();
    const int64_t predicted = predict(config, world.rank()).saved_bytes();
    const int64_t simulated = simulate<Trainer>(config, world.rank()).saved_bytes();
    USP_CHECK(measured == predicted && measured == simulated,
              "rank {}: {} bytes saved, {} by formula, {} in a dry run", world.rank(), measured,
              predicted, simulated);
  });
}

}  // namespace usp::test
