#include "train/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <span>
#include <vector>

#include "base/mapped_file.h"
#include "base/rules.h"
#include "files/file_kind.h"
#include "train/pretrained.h"

namespace usp {

namespace {

struct Preset {
  const char* name;
  int64_t hidden_size, num_layers, num_heads, num_kv_heads, ffn_hidden_size, vocab_size;
};

/// Two for a laptop (tiny is ModelConfig's default), and the shapes of Llama 3.
constexpr Preset kPresets[] = {
    {"tiny", 192, 4, 6, 6, 512, 256},        {"small", 512, 8, 8, 8, 1376, 4096},
    {"1B", 2048, 16, 32, 8, 8192, 128256},   {"8B", 4096, 32, 32, 8, 14336, 128256},
    {"70B", 8192, 80, 64, 8, 28672, 128256}, {"405B", 16384, 126, 128, 8, 53248, 128256},
};

/// The flags that say what the model is: a directory's config.json says it too.
constexpr const char* kShapeFlags[] = {
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
    "rope_theta",
    "rope_type",
    "rope_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_mscale",
    "rope_mscale_all_dim",
    "rope_original_max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
};

/// The same, where a program has them.
constexpr const char* kExpertFlags[] = {
    "num_experts",        "num_experts_per_tok", "moe_ffn_hidden_size", "num_shared_experts",
    "first_dense_layers", "router_score",        "norm_topk_prob",      "routed_scaling_factor",
    "expert_nodes",       "route_nodes",
};

constexpr const char* kLatentFlags[] = {
    "attention_kind",   "q_lora_rank", "kv_lora_rank",        "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",  "latent_rms_norm_eps",
};

std::string preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.push_back(preset.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

bool is_preset(const std::string& model) {
  return std::ranges::find(kPresets, model, &Preset::name) != std::end(kPresets);
}

void ModelConfig::bind(Args& args) {
  args.group("Model");
  args.bind("model", model,
            "preset whose shape the flags below override (tiny, small, 1B, 8B, 70B, 405B), or a "
            "directory with config.json and safetensors")
      .may_differ_on_resume();  // its shape may not
  args.bind("hidden_size", hidden_size, "width of the residual stream");
  args.bind("num_layers", num_layers, "transformer blocks");
  args.bind("num_heads", num_heads, "query heads");
  args.bind("num_kv_heads", num_kv_heads, "key and value heads");
  args.bind("head_dim", given_head_dim, "width of a head; 0: hidden_size / num_heads");
  args.bind("ffn_hidden_size", ffn_hidden_size, "width of the MLP");
  args.bind("vocab_size", vocab_size, "tokens; 256 for bytes");
  args.bind("rope_theta", rope_theta, "base of the rotary embedding");
  rope_scaling.bind(args);
  args.bind("rms_norm_eps", rms_norm_eps, "added to the mean square");
  args.bind("tie_word_embeddings", tie_word_embeddings, "lm_head reads the embedding's weight");
  args.bind("max_position_embeddings", max_position_embeddings,
            "longest sequence the model is made for; 0: seq_len");
  if (offers_latents) mla.bind(args);
  if (offers_experts) experts.bind(args);
}

void ModelConfig::fill_from_preset(const Args& args) {
  for (const Preset& preset : kPresets) {
    if (model != preset.name) continue;
    const auto fill = [&](const char* flag, int64_t& field, int64_t value) {
      if (!args.given(flag)) field = value;
    };
    fill("hidden_size", hidden_size, preset.hidden_size);
    fill("num_layers", num_layers, preset.num_layers);
    fill("num_heads", num_heads, preset.num_heads);
    // Without a word about kv heads, a changed number of heads means one for each.
    fill("num_kv_heads", num_kv_heads, args.given("num_heads") ? num_heads : preset.num_kv_heads);
    fill("ffn_hidden_size", ffn_hidden_size, preset.ffn_hidden_size);
    fill("vocab_size", vocab_size, preset.vocab_size);
    return;
  }
  std::error_code error;
  if (std::filesystem::is_regular_file(model, error)) {
    const std::string other =
        other_kind_than("a model's directory", MappedFile(model).bytes(), model);
    usage_error("model={}", other.empty() ? model +
                                                " is a file; give the directory that it is in, "
                                                "with config.json and model.safetensors"
                                          : other);
  }
  if (!std::filesystem::is_directory(model, error)) {
    usage_error(
        "model={} is no preset ({}) and no directory with config.json and model.safetensors, or "
        "model.safetensors.index.json and the files it names",
        model, preset_names());
  }
  read_directory(args);
}

void ModelConfig::read_directory(const Args& args) {
  const auto refuse = [&](std::span<const char* const> flags) {
    for (const char* flag : flags) {
      if (!args.given(flag)) continue;
      usage_error("{} cannot be given with model={}: its config.json decides; leave the flag out",
                  flag, model);
    }
  };
  refuse(kShapeFlags);
  if (offers_experts) refuse(kExpertFlags);
  if (offers_latents) refuse(kLatentFlags);
  const HfConfig file = read_hf_config(model);
  read_experts(file);
  read_latent(file);
  check_pretrained(model, file);
  pretrained = true;
  byte_tokens = file.byte_tokens || file.vocab_size == 256;
  hidden_size = file.hidden_size;
  num_layers = file.num_layers;
  num_heads = file.num_heads;
  num_kv_heads = file.num_kv_heads;
  given_head_dim = mla.on() ? 0 : file.head_dim;
  ffn_hidden_size = file.ffn_hidden_size;
  vocab_size = file.vocab_size;
  rope_theta = file.rope_theta;
  rope_scaling = file.rope_scaling;
  rms_norm_eps = file.rms_norm_eps;
  tie_word_embeddings = file.tie_word_embeddings;
  max_position_embeddings = file.max_position_embeddings;
  model = std::filesystem::canonical(model);  // as the run's record has to say it
}

void ModelConfig::read_experts(const HfConfig& file) {
  const HfExperts& from = file.experts;
  if (from.num_experts == 0) return;
  if (!offers_experts) {
    usage_error(
        "model={}: its MLPs are mixtures of {} experts, and this program computes dense ones; a "
        "program that has the flag num_experts computes both",
        model, from.num_experts);
  }
  experts.num_experts = from.num_experts;
  experts.num_experts_per_tok = from.num_experts_per_tok;
  experts.moe_ffn_hidden_size = from.moe_ffn_hidden_size;
  experts.num_shared_experts = from.num_shared_experts;
  experts.first_dense_layers = from.first_dense_layers;
  experts.router_score = from.router_score;
  experts.norm_topk_prob = from.norm_topk_prob;
  experts.routed_scaling_factor = from.routed_scaling_factor;
  experts.expert_nodes = from.expert_nodes;
  experts.route_nodes = from.route_nodes;
  experts.choice_bias = from.choice_bias;
}

void ModelConfig::read_latent(const HfConfig& file) {
  const HfLatentAttention& from = file.latent;
  if (from.kv_lora_rank == 0) return;
  if (!offers_latents) {
    usage_error(
        "model={}: its keys and values are made of latents of {} numbers (multi-head latent "
        "attention), and this program computes grouped-query attention; a program that has the "
        "flag attention_kind computes both",
        model, from.kv_lora_rank);
  }
  mla.attention_kind = "mla";
  mla.q_lora_rank = from.q_lora_rank;
  mla.kv_lora_rank = from.kv_lora_rank;
  mla.qk_nope_head_dim = from.qk_nope_head_dim;
  mla.qk_rope_head_dim = from.qk_rope_head_dim;
  mla.v_head_dim = from.v_head_dim;
  mla.latent_rms_norm_eps = from.rms_norm_eps;
}

int64_t ModelConfig::layer_weights(int64_t layer, bool active) const {
  const int64_t dense = 3 * hidden_size * ffn_hidden_size;
  return attention_weights() +
         (experts.at(layer) ? experts.weights(hidden_size, ffn_hidden_size, active) : dense);
}

int64_t ModelConfig::attention_weights() const {
  if (mla.on()) return mla.matmul_weights(hidden_size, num_heads);
  return hidden_size * 2 * (num_heads + num_kv_heads) * head_dim();
}

int64_t ModelConfig::attention_inputs() const {
  if (!mla.on()) return hidden_size;
  return (mla.q_lora_rank > 0 ? mla.q_lora_rank : hidden_size) + mla.cached();
}

int64_t ModelConfig::latent_weights() const {
  if (!mla.on()) return 0;
  return mla.norm_weights() + hidden_size * (mla.q_lora_rank + mla.cached());
}

/// Completes and checks latent attention, which not every program offers.
void ModelConfig::validate_latent(const Args& args) {
  if (mla.on() && !pretrained) mla.fill(hidden_size / num_heads);
  if (mla.on() && !args.given("num_kv_heads")) num_kv_heads = num_heads;
  mla.validate(args, num_heads, num_kv_heads);
}

namespace {

/// Settings of RoPE that its type does not have: without a word, the run would be one without them.
void refuse_settings_of_other_types(const Args& args, const std::string& type) {
  constexpr std::pair<const char*, std::string_view> kTypes[] = {
      {"rope_factor", "linear, llama3 and yarn"},
      {"rope_low_freq_factor", "llama3"},
      {"rope_high_freq_factor", "llama3"},
      {"rope_beta_fast", "yarn"},
      {"rope_beta_slow", "yarn"},
      {"rope_mscale", "yarn"},
      {"rope_mscale_all_dim", "yarn"},
      {"rope_original_max_position_embeddings", "llama3 and yarn"},
  };
  for (const auto& [flag, types] : kTypes) {
    if (!args.typed(flag) || types.find(type) != types.npos) continue;
    usage_error(
        "{} is a setting of rope_type {}, and has no effect with rope_type={}; leave it out", flag,
        types, type);
  }
}

void check_rope(double theta, const RopeScaling& scaling) {
  check_range("rope_theta", theta, 1, HUGE_VAL);
  scaling.validate();
  if (scaling.rope_type == "yarn" && theta == 1) {
    refuse(
        "waves_of_yarn", values_of("rope_theta", {10000}),
        "rope_theta=1 makes all waves equally long, but rope_type=yarn tells them apart by length");
  }
}

}  // namespace

/// The bytes of all weights that multiply, sixteen times as many and more, have to be counted.
void ModelConfig::check_countable(const Args& args) const {
  constexpr double kMaxWeights = 0x1p52;
  const double widths =
      4.0 * double(num_heads) * double(head_dim()) + 3.0 * double(ffn_hidden_size);
  const double latents = mla.on() ? double(mla.q_lora_rank + mla.kv_lora_rank) : 0;
  const double of_latents =
      latents * (double(hidden_size) + 2 * double(num_heads) * double(head_dim()));
  const double of_layer = double(hidden_size) * widths + of_latents;
  const double outside = 2 * double(hidden_size) * double(vocab_size);
  const double weights = double(num_layers) * of_layer + outside;
  if (weights <= kMaxWeights) return;
  std::string preset = "--model 405B";
  for (const char* flag : kShapeFlags) {
    if (args.typed(flag)) preset = together(preset, fmt::format("leave out --{}", flag));
  }
  const auto layers = static_cast<int64_t>((kMaxWeights - outside) / of_layer);
  Remedies remedies = values_of("num_layers", {layers});
  if (layers < 1) remedies.clear();
  remedies.push_back(preset);
  refuse("weights_that_count", remedies,
         "num_layers={} of hidden_size={} make {:.1g} weights, and at most {:.1g} can be counted",
         num_layers, hidden_size, weights, kMaxWeights);
}

void ModelConfig::validate(const Args& args) {
  fill_from_preset(args);
  constexpr double kMaxWidth = 1 << 24, kMaxLayers = 1 << 12;
  check_range("hidden_size", double(hidden_size), 1, kMaxWidth);
  check_range("num_layers", double(num_layers), 1, kMaxLayers);
  check_range("num_heads", double(num_heads), 1, kMaxWidth);
  check_range("num_kv_heads", double(num_kv_heads), 1, kMaxWidth);
  check_range("ffn_hidden_size", double(ffn_hidden_size), 1, kMaxWidth);
  check_range("vocab_size", double(vocab_size), 2, double(INT32_MAX));
  check_range("head_dim", double(given_head_dim), 0, kMaxWidth);
  if (offers_latents) validate_latent(args);
  if (given_head_dim == 0 && !mla.on() && hidden_size % num_heads != 0) {
    refuse_silent("heads_of_width", divisors_of("num_heads", hidden_size, 2 * num_heads),
                  "num_heads={} must divide hidden_size={}, or head_dim be given", num_heads,
                  hidden_size);
  }
  if (num_heads % num_kv_heads != 0) {
    refuse("kv_heads_of_heads", divisors_of("num_kv_heads", num_heads),
           "num_kv_heads={} must divide num_heads={}", num_kv_heads, num_heads);
  }
  if (!mla.on() && head_dim() % 2 != 0) {
    refuse("pairs_of_head", values_of("head_dim", {head_dim() + 1}),
           "head_dim={} must be even: RoPE turns pairs of channels", head_dim());
  }
  check_countable(args);
  check_rope(rope_theta, rope_scaling);
  refuse_settings_of_other_types(args, rope_scaling.rope_type);
  check_range("max_position_embeddings", double(max_position_embeddings), 0, HUGE_VAL);
  check_range("rms_norm_eps", rms_norm_eps, 0, 1);
  if (offers_experts) experts.validate(args, num_layers);
}

}  // namespace usp
