#include "train/mla_shape.h"

#include "base/rules.h"

namespace usp {

int64_t MlaShape::matmul_weights(int64_t hidden_size, int64_t num_heads) const {
  const int64_t q_input = q_lora_rank > 0 ? q_lora_rank : hidden_size;
  const int64_t queries = hidden_size * q_lora_rank + q_input * num_heads * head_dim();
  const int64_t keys =
      hidden_size * cached() + kv_lora_rank * num_heads * (qk_nope_head_dim + v_head_dim);
  return queries + keys + num_heads * v_head_dim * hidden_size;
}

void MlaShape::bind(Args& args) {
  args.group("Attention");
  args.bind("attention_kind", attention_kind, {"gqa", "mla"},
            "keys and values of heads that share them, or of a latent vector that all heads share");
  args.bind("q_lora_rank", q_lora_rank, "width of the queries' latent; 0: queries are made of x");
  args.bind("kv_lora_rank", kv_lora_rank,
            "width of the latent of keys and values; 0: 4 hidden_size / num_heads");
  args.bind("qk_nope_head_dim", qk_nope_head_dim,
            "channels of a head's query and key without RoPE; 0: hidden_size / num_heads");
  args.bind("qk_rope_head_dim", qk_rope_head_dim,
            "channels with RoPE, in keys one head for all; 0: hidden_size / num_heads / 2");
  args.bind("v_head_dim", v_head_dim, "channels of a head's value; 0: hidden_size / num_heads");
  args.bind("latent_rms_norm_eps", latent_rms_norm_eps,
            "added to the mean square in the norms of latents; 0: rms_norm_eps");
  // A program without latents has a model without them.
  args.decide_result([this] {
    return on() ? std::vector<std::string>{"attention_kind"} : std::vector<std::string>{};
  });
}

void MlaShape::fill(int64_t width) {
  if (qk_nope_head_dim == 0) qk_nope_head_dim = width;
  if (qk_rope_head_dim == 0) qk_rope_head_dim = width / 4 * 2;  // even
  if (v_head_dim == 0) v_head_dim = width;
  if (kv_lora_rank == 0) kv_lora_rank = 4 * width;
}

void MlaShape::validate(const Args& args, int64_t num_heads, int64_t num_kv_heads) const {
  for (const char* flag : {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                           "v_head_dim", "latent_rms_norm_eps"}) {
    if (on() || !args.given(flag)) continue;
    refuse_silent("flag_of_latents", {"--attention_kind mla", fmt::format("leave out --{}", flag)},
                  "{} needs latent attention", flag);
  }
  if (!on()) return;
  constexpr double kMaxWidth = 1 << 24;
  check_range("q_lora_rank", double(q_lora_rank), 0, kMaxWidth);
  check_range("kv_lora_rank", double(kv_lora_rank), 1, kMaxWidth);
  check_range("qk_nope_head_dim", double(qk_nope_head_dim), 1, kMaxWidth);
  check_range("qk_rope_head_dim", double(qk_rope_head_dim), 2, kMaxWidth);
  check_range("v_head_dim", double(v_head_dim), 1, kMaxWidth);
  check_range("latent_rms_norm_eps", latent_rms_norm_eps, 0, 1);
  if (qk_rope_head_dim % 2 != 0) {
    refuse("pairs_of_channels", values_of("qk_rope_head_dim", {qk_rope_head_dim + 1}),
           "qk_rope_head_dim={} must be even: RoPE turns pairs of channels", qk_rope_head_dim);
  }
  if (v_head_dim > head_dim()) {
    refuse("value_within_key", values_of("v_head_dim", {head_dim()}),
           "v_head_dim={} must be at most qk_nope_head_dim + qk_rope_head_dim={}: attention pads a "
           "value to the width of a key",
           v_head_dim, head_dim());
  }
  if (args.given("head_dim")) {
    usage_error(
        "head_dim is for attention_kind=gqa; leave it out, and give qk_nope_head_dim, "
        "qk_rope_head_dim and v_head_dim");
  }
  if (num_kv_heads != num_heads) {
    refuse_silent(
        "heads_of_latents", {"leave out --num_kv_heads"},
        "attention_kind=mla makes a key and a value for each of num_heads={}: num_kv_heads={} is "
        "for gqa",
        num_heads, num_kv_heads);
  }
}

}  // namespace usp
