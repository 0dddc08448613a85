#pragma once

#include <string>

#include "args.h"
#include "comm/comm_config.h"
#include "data_parallel.h"
#include "dtype.h"
#include "plan.h"

namespace usp {

/// The shape of a Llama. Playbook: h = hidden_size, L = num_layers, n_heads, v = vocab_size.
struct ModelConfig {
  std::string model = "tiny";  ///< a preset; the flags below override it
  int64_t hidden_size = 192;
  int64_t num_layers = 4;
  int64_t num_heads = 6;
  int64_t num_kv_heads = 6;  ///< fewer than num_heads: grouped-query attention
  int64_t ffn_hidden_size = 512;
  int64_t vocab_size = 256;  ///< 256: every token is a byte
  double rope_theta = 10000;
  double rms_norm_eps = 1e-5;
  bool tie_word_embeddings = false;  ///< lm_head reads the embedding's weight

  int64_t head_dim() const { return hidden_size / num_heads; }

  void bind(Args& args);
  /// Fills what the command line left open from the preset, and checks the result; throws
  /// UsageError.
  void validate(const Args& args);
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

  void bind(Args& args);
  void validate(const Args& args) const;
};

/// Everything a run is a function of. Field = flag = the field's standard name.
struct TrainConfig {
  ModelConfig model;
  OptimizerConfig optimizer;
  SampleConfig sample;

  int64_t steps = 400;
  int64_t seq_len = 256;         ///< tokens per sample
  int64_t micro_batch_size = 8;  ///< samples per forward
  int64_t grad_acc_steps = 1;    ///< micro-batches per optimizer step
  int64_t seed = 1;
  std::string dtype = "f32";
  std::string device = "auto";
  std::string attention = "blockwise";

  std::string data;  ///< empty: the project's own corpus
  std::string token_dtype = "uint16";
  std::string data_order = "shuffled";
  double val_fraction = 0.1;
  int64_t eval_interval = 50;  ///< steps between validations; 0: none
  int64_t eval_samples = 64;   ///< validation samples each time

  std::string run_dir = "runs/" USP_CHAPTER;
  bool overwrite = false;
  int64_t trace_steps = 3;

  // [batch_size]
  int64_t global_batch_size() const {
    return micro_batch_size * grad_acc_steps * data_parallel.dp_size;
  }
  // [batch_size]
  int64_t tokens_per_step() const { return global_batch_size() * seq_len; }

  // [parts]
  CommConfig communication;
  DataParallelConfig data_parallel;
  PlanConfig planning;

  /// The parts that bring flags of their own.
  template <class Visit>
  void each_part(Visit visit) {
    visit(model);
    visit(optimizer);
    visit(sample);
    visit(communication);
    visit(data_parallel);
    visit(planning);
  }
  // [parts]

  void bind(Args& args);
  /// Resolves the model preset and refuses impossible values; throws UsageError.
  void validate(const Args& args);
};

}  // namespace usp
