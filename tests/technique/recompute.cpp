#include "technique/tiny_llama.h"

/// Recomputation trades operations for memory, and changes no result.
namespace usp::test {
namespace {

struct Way {
  const char *attention, *recompute;
};
constexpr Way kWays[] = {{"naive", "none"},     {"naive", "selective"},     {"naive", "full"},
                         {"blockwise", "none"}, {"blockwise", "selective"}, {"blockwise", "full"}};

TrainConfig config_of(const Way& way, const char* dtype = "f64") {
  TrainConfig config = tiny_training();
  config.attention = way.attention;
  config.recompute = way.recompute;
  config.dtype = dtype;
  config.grad_acc_steps = 2;
  return config;
}

/// Loss, and gradients by name, of one step with random weights.
std::vector<std::pair<std::string, Values>> results_of(const TrainConfig& config,
                                                       const Dataset& dataset) {
  SoloTrainer trainer(config, &dataset);
  randomize(trainer.model().parameters(), 1);
  trainer.train_step(0);
  auto results = gradients_of(trainer.model().parameters());
  results.emplace_back("loss", Values{trainer.report(0, 0).loss});
  return results;
}

TEST_CASE("recomputation gives the gradients of none, bit for bit") {
  const OnDevice cpu;
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    for (bool tied : {false, true}) {
      for (const Way& way : kWays) {
        CAPTURE(dtype, tied, way.attention, way.recompute);
        TrainConfig config = config_of(way, dtype);
        config.model.tie_word_embeddings = tied;
        const RandomText text(config, 400);
        const auto actual = results_of(config, text.dataset);
        config.recompute = "none";
        const bool equal = actual == results_of(config, text.dataset);
        REQUIRE(equal);
      }
    }
  }
}

TEST_CASE("naive and blockwise attention give the same gradients") {
  const OnDevice cpu;
  for (const char* recompute : {"none", "selective", "full"}) {
    const TrainConfig naive = config_of({"naive", recompute});
    const RandomText text(naive, 400);
    const auto expected = results_of(naive, text.dataset);
    const auto actual = results_of(config_of({"blockwise", recompute}), text.dataset);
    for (size_t i = 0; i < expected.size(); ++i) {
      check_close(actual[i].second, expected[i].second, 1e-12, expected[i].first);
    }
  }
}

TEST_CASE("a step's operations are what the formula says: needed, and done again") {
  OnDevice meta(Device::meta);
  for (const Way& way : kWays) {
    for (int64_t kv_heads : {1, 2}) {
      CAPTURE(way.attention, way.recompute, kv_heads);
      TrainConfig config = config_of(way);
      config.model.num_kv_heads = kv_heads;
      const Prediction prediction = predict(config);
      const double needed = prediction.flops, again = prediction.recomputed_flops;
      const Simulation simulation = simulate<Trainer>(config);
      REQUIRE(simulation.recomputed_flops == again);
      REQUIRE(simulation.flops == needed + again);
      const bool nothing_again =
          std::string(way.attention) == "naive" && std::string(way.recompute) == "none";
      REQUIRE((again == 0) == nothing_again);
    }
  }
}

TEST_CASE("the operations of a step on the CPU are those of the simulation") {
  OnDevice cpu;
  for (const Way& way : kWays) {
    CAPTURE(way.attention, way.recompute);
    const TrainConfig config = config_of(way);
    const RandomText text(config, 400);
    SoloTrainer trainer(config, &text.dataset);
    trainer.train_step(0);
    REQUIRE(trainer.report(0, 0).flops == simulate<Trainer>(config).flops);
  }
}

/// Operations of the operators that a tracer has recorded, phases and blocks left out.
double traced_flops(const Tracer& tracer) {
  double flops = 0;
  for (const Tracer::Span& span : tracer.spans()) {
    if (span.category == "op") flops += span.flops;
  }
  return flops;
}

TEST_CASE("HFU is what the operators carried out, MFU what the model needs, by their definitions") {
  for (const Way& way : kWays) {
    CAPTURE(way.attention, way.recompute);
    OnDevice cpu;
    const TrainConfig config = config_of(way);
    const RandomText text(config, 400);
    SoloTrainer trainer(config, &text.dataset);
    trainer.train_step(0);  // another one, which does not count
    cpu.runtime.tracer().record(true);
    trainer.train_step(1);
    const StepMetrics metrics = trainer.report(1, /*peak_gflops=*/2.5);
    REQUIRE(metrics.step == 2);
    const double possible = 2.5e9 * metrics.step_ms * 1e-3;
    // Counted here, weight by weight and pair by pair: 2 forward and 4 backward.
    const ModelConfig& m = config.model;
    const double samples = double(config.global_batch_size()), S = double(config.seq_len);
    const double heads = double(m.num_layers * m.num_heads * m.head_dim());
    const double weights = double(trainer.model().parameters().numel() -
                                  (2 * m.num_layers + 1 + m.vocab_size) * m.hidden_size);
    double pairs = 0;
    for (int64_t query = 0; query < config.seq_len; ++query) pairs += double(query + 1);
    const double linear = 6 * weights * samples * S;
    const Values expected = {traced_flops(cpu.runtime.tracer()),
                             linear + 12 * heads * samples * pairs,
                             linear + 12 * heads * samples * S * S};
    check_close(Values{metrics.hfu * possible, metrics.mfu * possible, metrics.book_mfu * possible},
                expected, 1e-12);
    const bool nothing_again =
        std::string(way.attention) == "naive" && std::string(way.recompute) == "none";
    REQUIRE((metrics.hfu == metrics.mfu) == nothing_again);
    REQUIRE(metrics.hfu >= metrics.mfu);
    check_close(Values{metrics.tokens_per_s * metrics.step_ms * 1e-3}, Values{samples * S}, 1e-12);
  }
}

TEST_CASE("what recomputation keeps shrinks from none to selective to full") {
  OnDevice cpu;
  Random random(4);
  const Tensor loss = Tensor::zeros({1}, DType::f64);
  const int64_t seq_len = 40;
  const Pass pass = random_pass(random, tiny_model(), 2, seq_len, 0.1, loss);
  const auto kept_by = [&](Probabilities probabilities, bool blocks) {
    Model model = allocated_model(tiny_model(), seq_len, DType::f64, probabilities, 1);
    if (blocks) model.recompute({1, tiny_model().num_layers + 1});
    const int64_t before = cpu.allocator().live_bytes(Category::activations);
    const Model::Activations activations = model.forward(pass);
    return cpu.allocator().live_bytes(Category::activations) - before;
  };
  const int64_t none = kept_by(Probabilities::stored, false);
  const int64_t selective = kept_by(Probabilities::recomputed, false);
  const ModelConfig m = tiny_model();
  REQUIRE(none - selective == m.num_layers * 2 * m.num_heads * seq_len * seq_len * 8);
  REQUIRE(selective == kept_by(Probabilities::never_whole, false));
  const int64_t full = kept_by(Probabilities::stored, true);
  REQUIRE(full == kept_by(Probabilities::never_whole, true));
  REQUIRE(full < selective);
}

}  // namespace
}  // namespace usp::test
