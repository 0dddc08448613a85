#pragma once

#include <string>

#include "args.h"
#include "checkpoint.h"
#include "dtype.h"
#include "rope_scaling.h"

namespace usp {

/// The shape of a Llama. Playbook: h = hidden_size, L = num_layers, n_heads, v = vocab_size.
struct ModelConfig {
  /// A preset, which the flags below override, or a directory in Hugging Face's format, which they
  /// must leave alone.
  std::string model = "tiny";
  int64_t hidden_size = 192;
  int64_t num_layers = 4;
  int64_t num_heads = 6;
  int64_t num_kv_heads = 6;  ///< fewer than num_heads: grouped-query attention
  int64_t ffn_hidden_size = 512;
  int64_t vocab_size = 256;    ///< 256: every token is a byte
  int64_t given_head_dim = 0;  ///< --head_dim; 0: hidden_size / num_heads
  double rope_theta = 10000;
  RopeScaling rope_scaling{};
  double rms_norm_eps = 1e-5;
  bool tie_word_embeddings = false;  ///< lm_head reads the embedding's weight

  int64_t max_position_embeddings = 0;  ///< longest sequence it is made for; 0: seq_len
  bool pretrained = false;              ///< model is a directory, which has the weights
  bool byte_tokens = true;              ///< a text's bytes are tokens of this model

  int64_t head_dim() const { return given_head_dim > 0 ? given_head_dim : hidden_size / num_heads; }

  void bind(Args& args);
  /// Fills what the command line left open from the preset, and checks the result; throws
  /// UsageError.
  void validate(const Args& args);

 private:
  void fill_from_preset(const Args& args);
  void read_directory(const Args& args);
};

struct OptimizerConfig {
  double lr = 2e-3;
  double min_lr_ratio = 0.1;
  int64_t warmup_steps = 20;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.95;
  double adam_eps = 1e-8;
  double weight_decay = 0.1;
  double grad_clip = 1.0;  ///< largest gradient norm; 0: no clipping

  void bind(Args& args);
  void validate(const Args& args) const;
};

struct SampleConfig {
  int64_t sample_tokens = 256;
  double temperature = 0.8;
  int64_t top_k = 40;  ///< 0: all tokens
  std::string prompt = "The ";
  bool no_kv_cache = false;  ///< run all that the model sees again for every token
  std::string prompt_ids;    ///< the prompt as token ids; empty: the text

  void bind(Args& args);
  void validate(const Args& args) const;
};

/// Everything a run is a function of. Field = flag = the field's standard name.
struct TrainConfig {
  ModelConfig model;
  OptimizerConfig optimizer;
  CheckpointConfig checkpoints;
  SampleConfig sample;

  int64_t steps = 400;
  int64_t seq_len = 256;         ///< tokens per sample
  int64_t micro_batch_size = 8;  ///< samples per forward
  int64_t grad_acc_steps = 1;    ///< micro-batches per optimizer step
  int64_t seed = 1;
  std::string dtype = "f32";
  std::string device = "auto";
  std::string attention = "blockwise";
  std::string recompute = "none";
  std::string grad_accumulation = "f32";  ///< where dtype is bf16

  std::string data;  ///< empty: the project's own corpus
  std::string token_dtype = "uint16";
  std::string data_order = "shuffled";
  double val_fraction = 0.1;
  int64_t eval_interval = 50;  ///< steps between validations; 0: none
  int64_t eval_samples = 64;   ///< validation samples each time

  std::string run_dir = "runs/" USP_CHAPTER;
  bool overwrite = false;
  int64_t trace_steps = 3;
  bool estimate = false;
  std::string estimate_file;  ///< empty: none

  // [batch_size]
  int64_t global_batch_size() const { return micro_batch_size * grad_acc_steps; }
  // [batch_size]
  int64_t tokens_per_step() const { return global_batch_size() * seq_len; }

  // [parts]
  /// The parts that bring flags of their own.
  template <class Visit>
  void each_part(Visit visit) {
    visit(model);
    visit(optimizer);
    visit(checkpoints);
    visit(sample);
  }
  // [parts]

  void bind(Args& args);
  /// Resolves the model preset and refuses impossible values; throws UsageError.
  void validate(const Args& args);
};

}  // namespace usp
