#pragma once

#include "run/sample.h"
#include "technique/solo_trainer.h"
#include "testing.h"
#include "train/pretrained.h"

/// A Llama small enough for finite differences, with batches of random tokens, written against the
/// headers of whichever chapter the test is compiled for.
namespace usp::test {

/// Two layers, two query heads per kv head; no size is a multiple of a vector.
inline ModelConfig tiny_model() {
  ModelConfig config;
  config.hidden_size = 12;
  config.num_layers = 2;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.ffn_hidden_size = 10;
  config.vocab_size = 11;
  config.rope_theta = 100;
  return config;
}

inline Probabilities probabilities_of(bool naive) {
  return naive ? Probabilities::stored : Probabilities::never_whole;
}

/// A whole Llama whose parameters have their memory and initial values, or a checkpoint's.
inline Model allocated_model(const ModelConfig& config, int64_t seq_len, DType dtype,
                             Probabilities probabilities, uint64_t seed,
                             GradAccumulation accumulation = GradAccumulation::f32) {
  const Llama llama(config, {seq_len, dtype, probabilities});
  Model model([&](int64_t block, ParameterList& list) { return llama.build(block, list); },
              {{0, llama.num_blocks()}});
  model.parameters().allocate(dtype, seed, accumulation);
  if (config.pretrained) load_pretrained(model.parameters(), config.model);
  return model;
}

/// Training of the tiny model, in f64 without warm-up.
inline TrainConfig tiny_training() {
  TrainConfig config;
  config.model = tiny_model();
  config.optimizer.warmup_steps = 0;
  config.optimizer.lr = 0.01;
  config.steps = 20;
  config.seq_len = 7;
  config.micro_batch_size = 2;
  config.dtype = "f64";
  return config;
}

/// Whether the settings go together: the program's own rules say.
inline bool goes_together(TrainConfig config) {
  try {
    config.each_part([&](const auto& part) { part.check(config); });
  } catch (const UsageError&) {
    return false;
  }
  return true;
}

/// Weights far from their initial values, at which attention is almost uniform, every norm 1 and
/// many a mistake too small to see. In place, so that bf16 weights keep their masters.
inline void randomize(ParameterList& parameters, uint64_t seed) {
  Random random(seed);
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i];
    const bool norm = parameter.init_std == 0;
    Values values = random.normals(parameter.value.numel(), norm ? 0.3 : 0.5);
    for (double& value : values) value += norm ? 1 : 0;
    parameter.value.assign(values);
    parameter.shard.master.assign(values);
  }
}

/// What sample_tokens() draws from.
inline Logits logits_of(Model& model) {
  return [&](const Pass& pass) { return model.logits(pass); };
}

/// A micro-batch of random samples, every one of `config`'s tokens among them if there is room.
inline Pass random_pass(Random& random, const ModelConfig& config, int64_t num_samples,
                        int64_t seq_len, double loss_scale, const Tensor& loss) {
  Pass pass;
  pass.num_samples = num_samples;
  pass.positions = Positions(0, seq_len);
  pass.tokens = random.token_tensor(num_samples * seq_len, config.vocab_size);
  pass.targets = random.token_tensor(num_samples * seq_len, config.vocab_size);
  pass.loss_scale = loss_scale;
  pass.loss = loss;
  return pass;
}

/// The model's gradients by name, as they are.
inline std::vector<std::pair<std::string, Values>> gradients_of(ParameterList& parameters) {
  std::vector<std::pair<std::string, Values>> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    gradients.emplace_back(parameters[i].name, parameters[i].grad.items());
  }
  return gradients;
}

/// Random tokens below the model's vocabulary, as a training set.
class RandomText {
 public:
  RandomText(const TrainConfig& config, int64_t tokens, DataOrder order = DataOrder::shuffled)
      : file_(write(config, tokens), 2, config.model.vocab_size),
        dataset(file_, config.seq_len, 0.25, order, config.seed) {}

 private:
  std::string write(const TrainConfig& config, int64_t tokens) const {
    Random random(99);
    std::string ids;  // of 16 bits: random bytes are no text
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t id = random.integer(0, config.model.vocab_size - 1);
      ids += {static_cast<char>(id % 256), static_cast<char>(id / 256)};
    }
    return dir_.write("tokens.bin", ids);
  }

  TempDir dir_;
  TokenFile file_;

 public:
  Dataset dataset;
};

}  // namespace usp::test
