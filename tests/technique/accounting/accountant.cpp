#include <cmath>

#include "run/book_formulas.h"
#include "technique/tiny_llama.h"

/// The memory accountant: formulas, the dry run, and the allocator of a real run.
namespace usp::test {
namespace {

struct Case {
  const char *dtype, *attention, *recompute, *grad_accumulation;
  int64_t num_kv_heads, grad_acc_steps;
  bool tied;
};
constexpr Case kCases[] = {
    {"f32", "naive", "none", "f32", 2, 1, false},
    {"f32", "blockwise", "selective", "f32", 1, 2, true},
    {"f64", "naive", "selective", "f32", 1, 1, false},
    {"f64", "naive", "full", "f32", 2, 3, true},
    {"bf16", "naive", "none", "both", 1, 2, true},
    {"bf16", "blockwise", "none", "bf16", 2, 1, false},
    {"bf16", "blockwise", "full", "f32", 1, 2, false},
    {"bf16", "naive", "selective", "bf16", 2, 2, true},
};

TrainConfig config_of(const Case& c) {
  TrainConfig config = tiny_training();
  config.dtype = c.dtype;
  config.attention = c.attention;
  config.recompute = c.recompute;
  config.grad_accumulation = c.grad_accumulation;
  config.model.num_kv_heads = c.num_kv_heads;
  config.model.tie_word_embeddings = c.tied;
  config.grad_acc_steps = c.grad_acc_steps;
  config.seq_len = 33;
  return config;
}

using Parts = std::map<std::pair<int, std::string>, int64_t>;

Parts parts_of(const std::vector<LiveBytes>& tensors) {
  Parts parts;
  for (const LiveBytes& tensor : tensors) {
    parts[{tensor.block, std::string(tensor.name)}] += tensor.bytes;
  }
  return parts;
}

/// What a run of two recorded steps on the CPU asked of memory.
Simulation measure(const TrainConfig& config, int64_t steps = 2) {
  OnDevice cpu;
  const RandomText text(config, 800);
  SoloTrainer trainer(config, &text.dataset);
  cpu.allocator().record_events(true);
  cpu.runtime.tracer().record(true);
  for (int64_t step = 0; step < steps; ++step) {
    cpu.runtime.tracer().set_step(step);
    trainer.train_step(step);
  }
  return make_simulation(steps);
}

TEST_CASE("bytes of states and saved activations are exactly those of the formulas") {
  for (const Case& c : kCases) {
    CAPTURE(c.dtype, c.attention, c.recompute, c.grad_accumulation, c.tied);
    const TrainConfig config = config_of(c);
    const StateBytes states = predict(config).states;
    const Parts activations = parts_of(predict(config).saved);
    for (const Simulation& found : {measure(config), simulate<Trainer>(config)}) {
      REQUIRE(found.states.weights == states.weights);
      REQUIRE(found.states.gradients == states.gradients);
      REQUIRE(found.states.optimizer == states.optimizer);
      const Parts saved = parts_of(found.saved);
      for (const auto& [part, bytes] : activations) {
        CAPTURE(part.first, part.second);
        REQUIRE(saved.count(part) == 1);
        REQUIRE(saved.at(part) == bytes);
      }
      REQUIRE(saved.size() == activations.size());
    }
  }
}

TEST_CASE("peaks and reserved bytes of a run are exactly those of a dry run") {
  for (const Case& c : kCases) {
    CAPTURE(c.dtype, c.attention, c.recompute, c.grad_accumulation, c.tied);
    const TrainConfig config = config_of(c);
    const Simulation real = measure(config), meta = simulate<Trainer>(config);
    REQUIRE(real.peak_activations == meta.peak_activations);
    REQUIRE(real.reserved == meta.reserved);
    REQUIRE(meta.reserved >= meta.peak - 4096);
  }
}

/// Whichever tensors are the largest: of long samples, wide layers, many channels or a vocabulary.
std::vector<TrainConfig> extremes(const TrainConfig& config) {
  std::vector<TrainConfig> result(5, config);
  result[0].seq_len = 2;
  result[1].seq_len = 150;
  result[2].model.ffn_hidden_size = 300;
  result[3].model.hidden_size = 200;
  result[4].model.vocab_size = 400;
  return result;
}

TEST_CASE("the peak of activations is exactly that of the formula, whatever is the largest") {
  for (const char* dtype : {"f64", "f32", "bf16"}) {
    for (const char* attention : {"naive", "blockwise"}) {
      for (const char* recompute : {"none", "selective", "full"}) {
        for (const int64_t num_kv_heads : {1, 2}) {
          const bool tied = num_kv_heads == 1;
          const Case c{dtype, attention, recompute, "f32", num_kv_heads, tied ? 3 : 1, tied};
          for (const TrainConfig& config : extremes(config_of(c))) {
            CAPTURE(dtype, attention, recompute, num_kv_heads, config.seq_len,
                    config.model.hidden_size, config.model.ffn_hidden_size,
                    config.model.vocab_size);
            REQUIRE(predict(config).peak_activations == simulate<Trainer>(config).peak_activations);
          }
        }
      }
    }
  }
}

#if __has_include("data_parallel/zero.h")
/// The most that allocations and releases leave live, counted from what they are one by one.
int64_t replayed_peak(const std::vector<Allocator::Event>& events, bool communication) {
  int64_t live = 0, peak = 0;
  for (const Allocator::Event& event : events) {
    if (event.tag.category == Category::communication && !communication) continue;
    live += event.bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

TEST_CASE("the peak of all has the buffers of communication in it") {
  for (const int64_t stage : {1, 2, 3}) {
    CAPTURE(stage);
    TrainConfig config = config_of(kCases[6]);
    config.data_parallel.dp_size = 4;
    config.data_parallel.zero_stage = stage;
    const OnDevice meta(Device::meta);
    Allocator& allocator = Runtime::current().allocator();
    allocator.record_events(true);
    DryEngine engine(0, 4);
    const Mesh mesh(Communicator::world(engine), config.mesh());
    Trainer trainer(config, {nullptr, mesh});
    const Simulation simulation = simulate_steps(trainer);
    REQUIRE(simulation.peak == replayed_peak(allocator.events(), true));
    REQUIRE(simulation.peak > replayed_peak(allocator.events(), false));
  }
}

TEST_CASE("the peak of activations is the formula's, however ranks share out the model") {
  for (const Case& c : kCases) {
    for (const int64_t stage : {0, 1, 2, 3}) {
      CAPTURE(c.dtype, c.attention, c.recompute, c.grad_accumulation, c.tied, stage);
      TrainConfig config = config_of(c);
      config.data_parallel.dp_size = 4;
      config.data_parallel.zero_stage = stage;
      REQUIRE(predict(config).peak_activations == simulate<Trainer>(config).peak_activations);
    }
  }
}
#endif

TEST_CASE("training takes 16, 18 or 20 bytes a parameter, and 16 in f32") {
  TrainConfig config = tiny_training();
  const double numel = double(num_parameters(config.model));
  const auto bytes = [&](const char* dtype, const char* accumulation) {
    config.dtype = dtype;
    config.grad_accumulation = accumulation;
    const int64_t measured = measure(config).states.total();
    REQUIRE(measured == predict(config).states.total());
    return double(measured) / numel;
  };
  REQUIRE(bytes("f32", "f32") == 16);
  REQUIRE(bytes("bf16", "bf16") == 16);
  REQUIRE(bytes("bf16", "f32") == 18);
  REQUIRE(bytes("bf16", "both") == 20);
  REQUIRE(predict(config).book_states == 20 * numel);
}

TEST_CASE(
    "the optimizer's states appear with the first update, so that the second step is larger") {
  const TrainConfig config = tiny_training();
  const Simulation first = measure(config, 1);
  OnDevice cpu;
  const RandomText text(config, 400);
  SoloTrainer trainer(config, &text.dataset);
  REQUIRE(cpu.allocator().live_bytes(Category::optimizer) == 0);
  int64_t activations_before = -1;
  for (int64_t step = 0; step < 3; ++step) {
    cpu.allocator().reset_peaks();
    trainer.train_step(step);
    REQUIRE(cpu.allocator().live_bytes(Category::optimizer) == first.states.optimizer);
    const int64_t activations = cpu.allocator().peak_bytes(Category::activations);
    if (step > 0) REQUIRE(activations == activations_before);
    activations_before = activations;
  }
}

TEST_CASE("peak memory does not grow with accumulation, and linearly with the micro-batch") {
  TrainConfig config = tiny_training();
  config.attention = "naive";
  const int64_t one = simulate<Trainer>(config).peak_activations;
  for (int64_t steps : {2, 5}) {
    config.grad_acc_steps = steps;
    REQUIRE(simulate<Trainer>(config).peak_activations == one);
  }
  config.grad_acc_steps = 1;
  config.micro_batch_size *= 3;
  const double ratio = double(simulate<Trainer>(config).peak_activations) / double(one);
  REQUIRE(std::abs(ratio - 3) < 0.01);
}

TEST_CASE("the book's formulas give the book's numbers") {
  TrainConfig config;
  config.model.hidden_size = 4096;
  config.model.num_layers = 32;
  config.model.num_heads = 32;
  config.micro_batch_size = 1;
  const auto gib = [&](int64_t seq_len, const char* recompute) {
    config.seq_len = seq_len;
    config.recompute = recompute;
    return book_activations(config, recompute) / double(1 << 30);
  };
  // Its charts of an 8B model add the input's dropout, s b h bytes.
  const auto chart = [&](int64_t seq_len) { return double(seq_len * 4096) / double(1 << 30); };
  REQUIRE(std::abs(gib(1024, "none") + chart(1024) - 9.254) < 5e-4);
  REQUIRE(std::abs(gib(4096, "none") + chart(4096) - 97.016) < 5e-4);
  REQUIRE(std::abs(gib(4096, "selective") + chart(4096) - 17.016) < 5e-4);
  REQUIRE(std::abs(gib(4096, "full") + chart(4096) - 1.016) < 5e-4);
  // GPT-3 175B: selective recomputation saves 70 % of the activations.
  config.model.hidden_size = 12288;
  config.model.num_layers = 96;
  config.model.num_heads = 96;
  const double saved = 1 - gib(2048, "selective") / gib(2048, "none");
  REQUIRE(std::abs(saved - 0.702) < 5e-4);
}

TEST_CASE("the estimate names formulas and simulation, and both are the same numbers") {
  TrainConfig config = tiny_training();
  config.attention = "naive";
  const Simulation simulation = simulate<Trainer>(config);
  const std::string text = estimate_text(config, {{predict(config), simulation}});
  for (const char* word : {"saved activations", "probabilities", "gate_up", "FLOPs of a step"}) {
    CAPTURE(word, text);
    REQUIRE(text.find(word) != std::string::npos);
  }
  REQUIRE(text.find(" -\n") == std::string::npos);  // no tensor that only the formula knows
}

}  // namespace
}  // namespace usp::test
