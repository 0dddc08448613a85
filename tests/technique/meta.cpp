#include "technique/tiny_llama.h"

/// A training step on the meta device: shapes without data.
namespace usp::test {
namespace {

/// What the command line `--model preset ...` resolves to.
TrainConfig preset(std::vector<const char*> words) {
  words.insert(words.begin(), "program");
  TrainConfig config;
  Args args("A test.");
  config.bind(args);
  REQUIRE(args.parse(static_cast<int>(words.size()), words.data()));
  config.validate(args);
  return config;
}

int64_t parameters_of(const TrainConfig& config) {
  Model model = allocated_model(config.model, 1, DType::bf16, Probabilities::never_whole, 1);
  return model.parameters().numel();
}

TEST_CASE("the presets have the parameter counts of Llama 3") {
  const OnDevice meta(Device::meta);
  REQUIRE(parameters_of(preset({"--model", "1B", "--tie_word_embeddings"})) == 1'235'814'400);
  REQUIRE(parameters_of(preset({"--model", "8B"})) == 8'030'261'248);
  REQUIRE(parameters_of(preset({"--model", "70B"})) == 70'553'706'496);
  REQUIRE(parameters_of(preset({"--model", "405B"})) == 405'853'388'800);
}

TEST_CASE("a training step of the 405B preset runs on meta and reads nothing") {
  OnDevice meta(Device::meta);
  for (const char* attention : {"naive", "blockwise"}) {
    const TrainConfig config = preset({"--model", "405B", "--dtype", "bf16", "--seq_len", "4096",
                                       "--micro_batch_size", "1", "--attention", attention});
    SoloTrainer trainer(config, nullptr);
    trainer.train_step(0);  // item() throws on meta
    trainer.train_step(1);
    const Allocator& allocator = meta.allocator();
    const int64_t numel = 405'853'388'800;
    // bf16 weights; f32 gradients; f32 master weights and two moments.
    REQUIRE(allocator.live_bytes(Category::weights) == 2 * numel);
    REQUIRE(allocator.live_bytes(Category::gradients) == 4 * numel);
    REQUIRE(allocator.live_bytes(Category::optimizer) == 12 * numel);
    REQUIRE(allocator.peak_bytes(Category::weights) == 2 * numel);
    REQUIRE(allocator.peak_bytes(Category::gradients) == 4 * numel);
    REQUIRE(allocator.peak_bytes(Category::optimizer) == 12 * numel);
    REQUIRE(allocator.live_bytes(Category::activations) == 0);
    REQUIRE(allocator.peak_bytes(Category::activations) > 126 * 4096 * int64_t{16384} * 2);
    REQUIRE(allocator.system_allocations() == 0);
  }
}

TEST_CASE("in f32 the optimizer holds two moments and the weights are their own masters") {
  OnDevice meta(Device::meta);
  SoloTrainer trainer(preset({"--model", "1B"}), nullptr);
  const int64_t numel = trainer.model().parameters().numel();
  trainer.train_step(0);
  REQUIRE(meta.allocator().live_bytes(Category::weights) == 4 * numel);
  REQUIRE(meta.allocator().live_bytes(Category::gradients) == 4 * numel);
  REQUIRE(meta.allocator().live_bytes(Category::optimizer) == 8 * numel);
}

TEST_CASE("a step allocates the same bytes in the same order on meta and on the CPU") {
  for (const char* dtype : {"f64", "bf16"}) {
    for (const char* attention : {"naive", "blockwise"}) {
      CAPTURE(dtype, attention);
      TrainConfig config = tiny_training();
      config.dtype = dtype;
      config.attention = attention;
      config.grad_acc_steps = 2;
      const RandomText text(config, 200);
      const Events meta = events_of(config, text.dataset, Device::meta);
      const Events cpu = events_of(config, text.dataset, Device::cpu);
      REQUIRE(meta.size() > 100);
      const bool equal = meta == cpu;
      REQUIRE(equal);
    }
  }
}

TEST_CASE("a step's floating-point operations are 6 per matmul weight and token, plus attention") {
  OnDevice meta(Device::meta);
  TrainConfig config = tiny_training();
  config.attention = "naive";  // blockwise multiplies q by k once more in backward
  config.grad_acc_steps = 3;
  config.model.given_head_dim = 10;
  SoloTrainer trainer(config, nullptr);
  const int64_t before = meta.runtime.flops();
  trainer.train_step(0);
  const int64_t flops = meta.runtime.flops() - before;
  const ModelConfig& m = config.model;
  const int64_t heads = m.num_heads * m.head_dim();  // wide
  const int64_t S = config.seq_len, samples = config.global_batch_size();
  const int64_t norms = (2 * m.num_layers + 1) * m.hidden_size;
  const int64_t lookup = m.vocab_size * m.hidden_size;
  const int64_t weights = trainer.model().parameters().numel() - norms - lookup;
  // Two matmuls forward and four back, over the pairs that the causal mask lets through.
  const int64_t attention = 6 * 2 * m.num_layers * samples * heads * (S * (S + 1) / 2);
  REQUIRE(flops == 6 * weights * samples * S + attention);
  // The book counts all S * S pairs.
  const double book = 6 * double(weights) + 12 * double(m.num_layers * heads * S);
  check_close(Values{model_flops_per_token(m, S)}, Values{book}, 1e-15);
}

}  // namespace
}  // namespace usp::test
