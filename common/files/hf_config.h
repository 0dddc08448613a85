#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "files/rope_scaling.h"

namespace usp {

/// What the config.json of a Hugging Face model directory says of a Llama.
struct HfConfig {
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn_hidden_size = 0;
  int64_t vocab_size = 0;
  int64_t max_position_embeddings = 0;
  double rope_theta = 0;
  RopeScaling rope_scaling;
  double rms_norm_eps = 0;
  bool tie_word_embeddings = false;
  bool byte_tokens = false;  ///< not Hugging Face's: the tokens below 256 are bytes, there is no
                             ///< tokenizer

  int64_t q_size() const { return num_heads * head_dim; }      ///< rows of q_proj
  int64_t kv_size() const { return num_kv_heads * head_dim; }  ///< rows of k_proj and v_proj
};

/// Reads the text of a config.json; `file` is for messages. A key that is missing has the value
/// that transformers would assume. Throws UsageError, with the key and its value, for another
/// architecture, a setting that our Llama does not compute, or an impossible value. Throws Error
/// for text that is no JSON.
HfConfig parse_hf_config(std::string_view text, const std::string& file);

/// The same for the config.json of a directory; throws UsageError too where there is none.
HfConfig read_hf_config(const std::string& directory);

}  // namespace usp
