#pragma once

#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/rng.h"
#include "technique/solo_trainer.h"
#include "tensor/runtime.h"

/// Data-parallel training next to training on one rank, for any engine. No Catch2 here: the same
/// comparison runs on rank threads under Catch2 and as a program under mpiexec.
namespace usp::test {

/// Everything that must not depend on the layout.
struct TrainedState {
  std::vector<double> losses, grad_norms;
  struct Named {
    std::string name;
    std::vector<double> values;
  };
  std::vector<Named> tensors;  ///< gradients (unclipped), moments and weights of each parameter
};

/// The trace of so many steps, from the first one on.
inline const Tracer& traced_steps(Trainer& trainer, int64_t steps = 1) {
  Tracer& tracer = Runtime::current().tracer();
  tracer.record(true);
  for (int64_t step = 0; step < steps; ++step) trainer.train_step(step);
  tracer.record(false);
  return tracer;
}

/// Whether an operator ran, from its begin to its end, while a message was on its way and the rank
/// did not wait for it.
inline bool hides(const Tracer::Span& span, const Tracer::Exchange& exchange) {
  return exchange.queued_ns < span.begin_ns && span.end_ns < exchange.wait_begin_ns;
}

/// Two layers, kv heads shared; no size that a rank count or a bucket divides. ~3,100 parameters.
inline TrainConfig parity_config() {
  TrainConfig config;
  config.model.hidden_size = 12;
  config.model.num_layers = 2;
  config.model.num_heads = 2;
  config.model.num_kv_heads = 1;
  config.model.ffn_hidden_size = 10;
  config.model.vocab_size = 61;
  config.optimizer.warmup_steps = 2;
  config.optimizer.lr = 0.01;
  config.optimizer.grad_clip = 0.5;  // below the norms that occur, so that clipping is at work
  config.steps = 20;
  config.seq_len = 7;
  config.dtype = "f64";
  return config;
}

/// A file of random tokens, all of the vocabulary among them: a row of the embedding that no token
/// reads would have no gradient to compare.
class RandomTokens {
 public:
  explicit RandomTokens(int64_t vocab_size) {
    std::string name = (std::filesystem::temp_directory_path() / "usp_tokens_XXXXXX").string();
    USP_CHECK(mkdtemp(name.data()) != nullptr, "no temporary directory");
    folder_ = name;
    std::ofstream stream(path());
    const RandomStream random(7, "tokens");
    for (uint64_t i = 0; i < 20000; ++i) {
      const auto token = random.bits(i).a % static_cast<uint64_t>(vocab_size);
      stream.put(static_cast<char>(token)).put(static_cast<char>(token >> 8));
    }
  }
  ~RandomTokens() { std::filesystem::remove_all(folder_); }
  RandomTokens(const RandomTokens&) = delete;
  RandomTokens& operator=(const RandomTokens&) = delete;

  std::string path() const { return (folder_ / "tokens.bin").string(); }

 private:
  std::filesystem::path folder_;
};

/// The whole tensor of the parameter, whose shard holds `values`: those where the shard is all of
/// it, else the values of all ranks' shards.
inline std::vector<double> whole(const Parameter& parameter, const std::vector<double>& values,
                                 const Communicator* world) {
  const int64_t numel = parameter.global_shape.numel();
  if (world == nullptr) return values;
  std::vector<double> all(numel, 0.0);
  const Shape local_shape = parameter.local_shape();
  for (size_t i = 0; parameter.counted && i < values.size(); ++i) {
    const int64_t local = parameter.shard.begin + static_cast<int64_t>(i);
    all[parameter.global_index(local, local_shape)] = values[i];
  }
  const Tensor sum = Tensor::from_host(all, {numel}, DType::f64);
  world->all_reduce(sum);
  return sum.items();
}

/// Trains; then collects what the ranks of `world` have sharded. nullptr: nothing is.
inline TrainedState train(Trainer& trainer, int64_t steps, const Communicator* world = nullptr) {
  TrainedState state;
  for (int64_t step = 0; step < steps; ++step) {
    trainer.train_step(step);
    const StepMetrics metrics = trainer.report(step, 0);
    state.losses.push_back(metrics.loss);
    state.grad_norms.push_back(metrics.grad_norm);
  }
  const ParameterList& parameters = trainer.model().parameters();
  int64_t offset = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const Shard& shard = parameter.shard;
    const auto add = [&](const char* suffix, const Tensor& values) {
      state.tensors.push_back({parameter.name + suffix, whole(parameter, values.items(), world)});
    };
    const auto part = [&](const Tensor& flat) { return flat.narrow(0, offset, shard.numel()); };
    add(".grad", shard.grad);
    add(".m", part(trainer.optimizer().first_moments()));
    add(".v", part(trainer.optimizer().second_moments()));
    add("", shard.master);
    offset += shard.numel();
  }
  return state;
}

/// Throws Error unless max|a - b| <= tolerance max|b|.
inline void expect_close(const std::vector<double>& a, const std::vector<double>& b,
                         double tolerance, const std::string& what) {
  USP_CHECK(a.size() == b.size(), "{}", what);
  double difference = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = std::max(difference, std::abs(a[i] - b[i]));
    scale = std::max(scale, std::abs(b[i]));
    if (std::isnan(a[i]) || std::isnan(b[i])) difference = HUGE_VAL;
  }
  USP_CHECK(difference <= tolerance * scale, "{}: off by {} of {}", what, difference, scale);
}

inline void expect_close(const TrainedState& a, const TrainedState& b, double tolerance,
                         const std::string& what) {
  expect_close(a.losses, b.losses, tolerance, what + ": loss");
  expect_close(a.grad_norms, b.grad_norms, tolerance, what + ": gradient norm");
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    expect_close(a.tensors[i].values, b.tensors[i].values, tolerance,
                 what + ": " + b.tensors[i].name);
  }
}

inline bool same_bits(const TrainedState& a, const TrainedState& b) {
  bool same = a.losses == b.losses && a.grad_norms == b.grad_norms;
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    same = same && a.tensors[i].values == b.tensors[i].values;
  }
  return same;
}

/// The bytes of a step's gradient all-reduces, against the book's 2 (N-1)/N: summed over ranks, to
/// the byte.
inline void check_traffic(const Communicator& world, const Ledger::Entry& entry, int64_t steps,
                          int64_t gradient_bytes, const std::string& what) {
  if (world.size() == 1) gradient_bytes = 0;
  USP_CHECK(entry.payload_bytes == steps * gradient_bytes,
            "{}: {} bytes of payload in {} steps, {}"
            " expected",
            what, entry.payload_bytes, steps, steps * gradient_bytes);
  const double wire = world.sum(double(entry.wire_bytes));
  const double expected = 2.0 * double(steps * gradient_bytes) * (world.size() - 1);
  USP_CHECK(wire == expected, "{}: {} bytes on the wire, {} expected", what, wire, expected);
}

/// Trains over all ranks of `world` in every way there is, and on one rank. Throws Error on the
/// first difference; the batch of 72 samples must be divisible by three times the ranks.
inline void check_data_parallel_parity(const Communicator& world) {
  constexpr int64_t kSteps = 5, kGlobalBatch = 72;
  TrainConfig config = parity_config();
  const RandomTokens tokens(config.model.vocab_size);
  const TokenFile file(tokens.path(), 2, config.model.vocab_size);
  const Dataset dataset(file, config.seq_len, 0.1, DataOrder::shuffled, config.seed);
  const Mesh mesh(world, {.dp = world.size()});
  for (int64_t grad_acc_steps : {1, 3}) {
    config.data_parallel.dp_size = 1;
    config.grad_acc_steps = 1;
    config.micro_batch_size = kGlobalBatch;
    SoloTrainer solo(config, &dataset);
    const TrainedState expected = train(solo, kSteps);

    config.data_parallel.dp_size = world.size();
    config.grad_acc_steps = grad_acc_steps;
    config.micro_batch_size = kGlobalBatch / grad_acc_steps / world.size();
    std::vector<TrainedState> states;
    for (const char* grad_sync : {"naive", "overlapped", "bucketed"}) {
      const std::string what = fmt::format("dp {} {} x{}", world.size(), grad_sync, grad_acc_steps);
      config.data_parallel.grad_sync = grad_sync;
      config.data_parallel.bucket_mb = 137.0 * 8 / (1 << 20);  // cuts inside of parameters
      const Ledger::Entry before = Runtime::current().ledger().get("dp", CommKind::all_reduce);
      Trainer trainer(config, {&dataset, mesh});
      USP_CHECK(config.data_parallel.grad_sync != "bucketed" ||
                    trainer.data_parallel().num_buckets() >= 8,
                "{}: {} buckets", what, trainer.data_parallel().num_buckets());
      states.push_back(train(trainer, kSteps));
      expect_close(states.back(), expected, 1e-10, what);
      check_traffic(world, Runtime::current().ledger().get("dp", CommKind::all_reduce) - before,
                    kSteps, trainer.model().parameters().flat_grads().bytes(), what);
    }
    USP_CHECK(same_bits(states[0], states[1]) && same_bits(states[1], states[2]),
              "dp {} x{}: naive, overlapped and bucketed differ in their bits", world.size(),
              grad_acc_steps);
  }
}

}  // namespace usp::test
