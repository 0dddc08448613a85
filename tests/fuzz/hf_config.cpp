#include "files/hf_config.h"

#include "fuzz.h"

/// Any bytes as a config.json. What is read of them is a shape to compute with.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace usp;
  return refuses_or([&] {
    const HfConfig config =
        parse_hf_config({reinterpret_cast<const char*>(data), size}, "config.json");
    require(config.hidden_size > 0 && config.num_layers > 0 && config.ffn_hidden_size > 0,
            "sizes above 0");
    require(config.head_dim > 0, "a head_dim");
    require(config.latent.kv_lora_rank > 0 || config.head_dim % 2 == 0, "an even head_dim");
    require(config.num_kv_heads > 0 && config.num_heads % config.num_kv_heads == 0,
            "kv heads that divide the heads");
    require(config.q_size() > 0 && config.kv_size() > 0, "products below 2^63");
    require(config.vocab_size > 1 && config.max_position_embeddings > 0, "tokens and positions");
    require(config.rms_norm_eps >= 0 && config.rope_theta >= 1, "numbers in their ranges");
    const HfExperts& experts = config.experts;
    require(experts.num_experts >= 0 && experts.num_experts_per_tok > 0, "numbers of experts");
    if (experts.num_experts > 0) {
      require(experts.num_experts_per_tok <= experts.num_experts, "choices among the experts");
      require(experts.moe_ffn_hidden_size > 0, "a width of experts");
      require(experts.num_experts % experts.expert_nodes == 0, "groups of equal size");
      require(experts.route_nodes * (experts.num_experts / experts.expert_nodes) >=
                  experts.num_experts_per_tok,
              "enough experts in the groups that a token chooses in");
      require(experts.first_dense_layers <= config.num_layers, "dense layers that there are");
    }
    const HfLatentAttention& latent = config.latent;
    if (latent.kv_lora_rank > 0) {
      require(config.num_kv_heads == config.num_heads, "a key and a value for each head");
      require(latent.qk_rope_head_dim % 2 == 0, "channels in pairs");
      require(latent.v_head_dim > 0 && latent.v_head_dim <= config.head_dim, "values to be padded");
    }
    const double frequency = config.rope_scaling.frequency(config.rope_theta, 3, 16);
    const double unscaled = RopeScaling().frequency(config.rope_theta, 3, 16);
    require(frequency >= 0 && frequency <= unscaled * 1.0000001,
            "waves that are stretched, if anything");
    require(config.rope_scaling.amplitude() > 0 && config.rope_scaling.score_factor() >= 1,
            "factors above 0");
  });
}
