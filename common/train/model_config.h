#pragma once

#include <cstdint>
#include <string>

#include "base/args.h"
#include "files/hf_config.h"
#include "files/rope_scaling.h"
#include "train/expert_shape.h"
#include "train/mla_shape.h"

namespace usp {

struct RunConfig;

/// Whether `--model` of this name is a shape that is built in, and no directory.
bool is_preset(const std::string& model);

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
  ExpertShape experts{};             ///< in the place of dense MLPs
  MlaShape mla{};                    ///< in the place of grouped-query attention

  int64_t max_position_embeddings = 0;  ///< longest sequence it is made for; 0: seq_len
  bool pretrained = false;              ///< model is a directory, which has the weights
  bool byte_tokens = true;              ///< a text's bytes are tokens of this model
  bool offers_latents = false;          ///< the program has flags for `mla`, and can compute it
  bool offers_experts = false;          ///< the same of `experts`

  /// Channels of a head's query and key.
  int64_t head_dim() const {
    if (mla.on()) return mla.head_dim();
    return given_head_dim > 0 ? given_head_dim : hidden_size / num_heads;
  }
  /// Channels of a head's query and key that RoPE turns.
  int64_t rotary_dim() const { return mla.on() ? mla.qk_rope_head_dim : head_dim(); }
  /// Weights of one layer's attention that multiply activations.
  int64_t attention_weights() const;
  /// Weights of a layer that multiply activations; of experts all, or those that one token meets.
  int64_t layer_weights(int64_t layer, bool active) const;
  /// Numbers of a token that one layer's attention reads where its heads are sharded.
  int64_t attention_inputs() const;
  /// Weights of one layer's attention that are not any head's: those that make latents.
  int64_t latent_weights() const;

  void bind(Args& args);
  /// Fills what the command line left open from the preset, and checks the result; throws
  /// UsageError.
  void validate(const Args& args);
  void check(const RunConfig&) const {}  ///< what it has to divide by is the divisor's rule

 private:
  void fill_from_preset(const Args& args);
  void read_directory(const Args& args);
  void read_experts(const HfConfig& file);
  void read_latent(const HfConfig& file);
  void validate_latent(const Args& args);
  void check_countable(const Args& args) const;
};

}  // namespace usp
