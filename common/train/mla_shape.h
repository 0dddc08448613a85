#pragma once

#include <cstdint>
#include <string>

#include "base/args.h"

namespace usp {

/// The attention of a model, where keys and values are made of a narrow latent vector: multi-head
/// latent attention. DeepSeek-AI, DeepSeek-V2 (2024), https://arxiv.org/abs/2405.04434. Flags by
/// Hugging Face's names.
///
/// A head's query and key have qk_nope_head_dim channels without a position, and behind these
/// qk_rope_head_dim rotated ones, which in keys are the same for all heads. RoPE pairs channels c
/// and c + qk_rope_head_dim / 2. Hugging Face's DeepseekV3 pairs neighbors (rope_interleave):
/// of the rows that q_b_proj and kv_a_proj_with_mqa have for rotated channels, import and export
/// move its 2c and 2c + 1 to c and c + qk_rope_head_dim / 2, and back.
struct MlaShape {
  std::string attention_kind = "gqa";  ///< or "mla"
  int64_t q_lora_rank = 0;             ///< width of the queries' latent; 0: made of x directly
  int64_t kv_lora_rank = 0;            ///< C: width of the latent of keys and values
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  double latent_rms_norm_eps = 0;  ///< of the norms of latents; 0: rms_norm_eps

  bool on() const { return attention_kind == "mla"; }
  /// D: channels of a query and a key.
  int64_t head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  /// Channels of a position in the cache, for all heads together: the latent and the rotated key.
  int64_t cached() const { return kv_lora_rank + qk_rope_head_dim; }
  /// Weights of one layer that multiply activations, in a model of this width and number of heads.
  int64_t matmul_weights(int64_t hidden_size, int64_t num_heads) const;
  /// Weights of one layer's norms of latents.
  int64_t norm_weights() const { return q_lora_rank + kv_lora_rank; }

  void bind(Args& args);
  /// Gives widths that are 0 the ratios of DeepSeek-V2 to this one: nope 1, rope 1/2, v 1,
  /// latent 4.
  void fill(int64_t width);
  /// Throws UsageError where the numbers do not go together, or are given to a model of another
  /// attention.
  void validate(const Args& args, int64_t num_heads, int64_t num_kv_heads) const;
};

}  // namespace usp
