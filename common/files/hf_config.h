#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "files/rope_scaling.h"

namespace usp {

/// What a config.json says of the experts in the place of MLPs.
struct HfExperts {
  int64_t num_experts = 0;  ///< beside the shared ones; 0: every MLP is dense
  int64_t num_experts_per_tok = 1;
  int64_t moe_ffn_hidden_size = 0;  ///< width of an expert
  int64_t num_shared_experts = 0;
  int64_t first_dense_layers = 0;
  std::string router_score = "softmax";  ///< or "sigmoid"
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1;
  int64_t expert_nodes = 1;  ///< groups of experts in a row
  int64_t route_nodes = 1;   ///< groups in which a token chooses
  bool choice_bias = false;  ///< each layer has an e_score_correction_bias [num_experts]

  bool operator==(const HfExperts&) const = default;
};

/// What a config.json says of attention with a latent vector for keys and values.
struct HfLatentAttention {
  int64_t q_lora_rank = 0;   ///< 0: queries are made of x
  int64_t kv_lora_rank = 0;  ///< 0: the attention is another one
  int64_t qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  /// RoPE turns neighboring channels 2c and 2c + 1 as pairs, not c and c + qk_rope_head_dim / 2.
  bool rope_interleave = false;
  double rms_norm_eps = 0;  ///< of the norms of latents

  bool operator==(const HfLatentAttention&) const = default;
};

/// What the config.json of a Hugging Face model directory says of a Llama, or of a model that
/// differs from one in its MLPs, its attention and the names of its weights.
struct HfConfig {
  std::string model_type = "llama";  ///< or "mistral", "mixtral", "deepseek_v3"
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;  ///< channels of a query and a key
  int64_t ffn_hidden_size = 0;
  int64_t vocab_size = 0;
  int64_t max_position_embeddings = 0;
  double rope_theta = 0;
  RopeScaling rope_scaling;
  double rms_norm_eps = 0;
  bool tie_word_embeddings = false;
  HfExperts experts;
  HfLatentAttention latent;
  int64_t predicting_layers = 0;  ///< behind the others, of which the model here has none
  bool byte_tokens = false;  ///< not Hugging Face's: the tokens below 256 are bytes, there is no
                             ///< tokenizer

  int64_t q_size() const { return num_heads * head_dim; }      ///< rows of q_proj
  int64_t kv_size() const { return num_kv_heads * head_dim; }  ///< rows of k_proj and v_proj

  bool operator==(const HfConfig&) const = default;
};

/// What becomes of a key of config.json. A key without a row here is refused, because it may change
/// what the model computes.
struct HfKey {
  /// What is done with the key.
  enum Rule {
    used,      ///< read, so a value of another type is refused
    harmless,  ///< says nothing about what the model computes
    only,      ///< a setting of which one value is computed here; any other is refused
    absent,    ///< refused, whatever its value
  };
  const char* key;
  const char* model_types;  ///< that have it, separated by blanks
  Rule rule;
  const char* allowed = "null";  ///< by `only`, as JSON
  const char* reason = "";       ///< why other values are refused

  bool is_of(std::string_view model_type) const;  ///< have models of this type the key?
};

/// All keys that are known. One may have several rows, each for other kinds of models.
std::span<const HfKey> hf_keys();

/// A kind of model that people have and that is not computed here.
struct HfOtherKind {
  const char* model_type;
  const char* difference;  ///< what it has, or what is done in it, that is not computed here
};

/// Kinds that are refused by what is known of them; any other by its keys alone.
std::span<const HfOtherKind> hf_other_kinds();

/// Reads the text of a config.json; `file` is for messages. A key that is missing has the value
/// that transformers would assume. Throws UsageError, with the key and its value, for another kind
/// of model (with what differs), another architecture, a key that hf_keys() lacks, a setting that
/// our Llama does not compute, or an impossible value. Throws Error for text that is no JSON.
HfConfig parse_hf_config(std::string_view text, const std::string& file);

/// The same for the config.json of a directory; throws UsageError too where there is none, or an
/// adapter's beside it.
HfConfig read_hf_config(const std::string& directory);

}  // namespace usp
