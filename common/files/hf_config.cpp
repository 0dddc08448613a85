#include "files/hf_config.h"

#include <cmath>
#include <filesystem>
#include <optional>

#include "base/json_reader.h"
#include "base/mapped_file.h"

namespace usp {

namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxWidth = int64_t{1} << 24;  // of any axis; products stay far below 2^63
constexpr int64_t kMaxFileBytes = int64_t{1} << 20;

/// A value as it stands in the file, shortened.
std::string shown(const Json& json) {
  std::string text =
      json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  constexpr size_t kMaxLength = 60;
  return text.size() > kMaxLength ? text.substr(0, kMaxLength) + "..." : text;
}

/// One object of the file. A value of null counts as absent, as it does for transformers.
class Fields {
 public:
  /// `where`: the file, or the file and the key of the object.
  Fields(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) usage_error("{}: {} is no JSON object", where_, shown(json));
  }

  const std::string& where() const { return where_; }
  const Json* find(const char* key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }

  /// Where the key stands in the file, but with the value null.
  bool is_null(const char* key) const { return json_.contains(key) && json_.at(key).is_null(); }

  int64_t integer(const char* key, std::optional<int64_t> otherwise, int64_t minimum,
                  int64_t maximum) const {
    const Json* value = find_or_refuse(key, otherwise.has_value());
    if (value == nullptr) return *otherwise;
    const bool fits = value->is_number_unsigned() ? value->get<uint64_t>() <= uint64_t(maximum)
                                                  : value->is_number_integer();
    if (!fits || value->get<int64_t>() < minimum) {
      refuse(key, *value, fmt::format("must be a whole number in [{}, {}]", minimum, maximum));
    }
    return value->get<int64_t>();
  }

  /// In [minimum, maximum]; HUGE_VAL: any finite number.
  double number(const char* key, std::optional<double> otherwise, double minimum,
                double maximum) const {
    const Json* value = find_or_refuse(key, otherwise.has_value());
    if (value == nullptr) return *otherwise;
    const bool fits = value->is_number() && std::isfinite(value->get<double>()) &&
                      value->get<double>() >= minimum && value->get<double>() <= maximum;
    if (!fits) {
      refuse(key, *value,
             maximum == HUGE_VAL ? fmt::format("must be a number of at least {}", minimum)
                                 : fmt::format("must be a number in [{}, {}]", minimum, maximum));
    }
    return value->get<double>();
  }

  bool boolean(const char* key, bool otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse(key, *value, "must be true or false");
    return value->get<bool>();
  }

  /// Empty if the file does not say.
  std::string text(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return "";
    if (!value->is_string()) refuse(key, *value, "must be text");
    return value->get<std::string>();
  }

  /// Refuses every value of the key but `allowed` (and absence).
  void only(const char* key, const Json& allowed, const char* reason) const {
    const Json* value = find(key);
    if (value != nullptr && *value != allowed) {
      refuse(key, *value, fmt::format("{}; supported: {}", reason, shown(allowed)));
    }
  }
  void absent(const char* key, const char* reason) const {
    const Json* value = find(key);
    if (value != nullptr) refuse(key, *value, reason);
  }

  [[noreturn]] void refuse(const char* key, const Json& value, const std::string& rule) const {
    usage_error("{}: {}={} {}", where_, key, shown(value), rule);
  }

 private:
  const Json* find_or_refuse(const char* key, bool optional) const {
    const Json* value = find(key);
    if (value == nullptr && !optional) usage_error("{}: {} is missing", where_, key);
    return value;
  }

  const Json& json_;
  std::string where_;
};

/// A kind of model, with what transformers assumes where its config.json is silent.
struct Family {
  const char* model_type;
  const char* architecture;
  int64_t num_kv_heads;  ///< 0: as many as heads
  int64_t max_position_embeddings;
  double rope_theta, rms_norm_eps;
};

constexpr Family kFamilies[] = {
    {"llama", "LlamaForCausalLM", 0, 2048, 1e4, 1e-6},
    {"mixtral", "MixtralForCausalLM", 8, 131072, 1e6, 1e-5},
    {"deepseek_v3", "DeepseekV3ForCausalLM", 128, 4096, 1e4, 1e-6},
};

const Family& family_of(const Fields& fields) {
  constexpr const char* kSupported = "supported: \"llama\", \"mixtral\" and \"deepseek_v3\"";
  if (fields.find("model_type") == nullptr) {
    usage_error("{}: model_type is missing; {}", fields.where(), kSupported);
  }
  const std::string model_type = fields.text("model_type");
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return family;
  }
  fields.refuse("model_type", *fields.find("model_type"),
                fmt::format("is not supported; {}", kSupported));
}

/// What transformers can do and the model here does not.
void refuse_unsupported(const Fields& fields, const Family& family) {
  const Json* architectures = fields.find("architectures");
  const Json supported = Json::array({family.architecture});
  if (architectures != nullptr && *architectures != supported) {
    fields.refuse("architectures", *architectures,
                  fmt::format("is not supported; supported: {}", shown(supported)));
  }
  fields.only("hidden_act", "silu", "is not supported: the MLP is SwiGLU");
  fields.only("attention_bias", false, "is not supported: projections have no biases");
  fields.only("mlp_bias", false, "is not supported: projections have no biases");
  fields.only("attention_dropout", 0, "is not supported: there is no dropout");
  fields.only("pretraining_tp", 1, "is not supported: it computes projections in slices");
  fields.only("partial_rotary_factor", 1, "is not supported: RoPE turns every channel");
  fields.only("is_encoder_decoder", false, "is not supported");
  fields.only("add_cross_attention", false, "is not supported");
  fields.only("use_sliding_window", false, "is not supported: attention reaches back to the start");
  fields.absent("sliding_window", "is not supported: attention reaches back to the start");
  fields.absent("layer_types", "is not supported: all layers are alike");
  fields.absent("quantization_config", "is not supported: weights must be F32, BF16, F16 or F64");
  fields.only("router_jitter_noise", 0, "is not supported: routers add no noise");
  fields.only("scoring_func", "sigmoid", "is not supported");
  fields.only("topk_method", "noaux_tc", "is not supported: a bias balances the experts");
  fields.only("moe_layer_freq", 1,
              "is not supported: from the first layer with experts on, all have");
  if (std::string_view(family.model_type) != "llama") return;
  for (const char* key : {"num_local_experts", "n_routed_experts"}) {
    fields.absent(key, "is not supported: the MLP of a \"llama\" is dense");
  }
}

constexpr int64_t kMaxExperts = 1 << 16;

/// Of "mixtral".
HfExperts read_mixtral_experts(const Fields& fields) {
  HfExperts experts;
  experts.num_experts = fields.integer("num_local_experts", 8, 1, kMaxExperts);
  experts.num_experts_per_tok = fields.integer("num_experts_per_tok", 2, 1, experts.num_experts);
  experts.moe_ffn_hidden_size = fields.integer("intermediate_size", {}, 1, kMaxWidth);
  experts.norm_topk_prob = true;
  return experts;
}

/// Of "deepseek_v3".
HfExperts read_deepseek_experts(const Fields& fields, int64_t num_layers) {
  HfExperts experts;
  experts.num_experts = fields.integer("n_routed_experts", 256, 1, kMaxExperts);
  experts.num_experts_per_tok = fields.integer("num_experts_per_tok", 8, 1, experts.num_experts);
  experts.moe_ffn_hidden_size = fields.integer("moe_intermediate_size", 2048, 1, kMaxWidth);
  experts.num_shared_experts = fields.integer("n_shared_experts", 1, 0, 1 << 10);
  experts.first_dense_layers = fields.integer("first_k_dense_replace", 3, 0, num_layers);
  if (experts.first_dense_layers == num_layers) return {};
  experts.router_score = "sigmoid";
  experts.norm_topk_prob = fields.boolean("norm_topk_prob", true);
  experts.routed_scaling_factor = fields.number("routed_scaling_factor", 2.5, 1e-6, 1e6);
  experts.expert_nodes = fields.integer("n_group", 8, 1, experts.num_experts);
  experts.route_nodes = fields.integer("topk_group", 4, 1, experts.expert_nodes);
  experts.choice_bias = true;
  const int64_t size = experts.num_experts / experts.expert_nodes;
  if (experts.num_experts % experts.expert_nodes != 0) {
    usage_error("{}: n_group={} must divide n_routed_experts={}", fields.where(),
                experts.expert_nodes, experts.num_experts);
  }
  if (experts.route_nodes * size < experts.num_experts_per_tok) {
    usage_error("{}: topk_group={} groups of {} experts are fewer than num_experts_per_tok={}",
                fields.where(), experts.route_nodes, size, experts.num_experts_per_tok);
  }
  // transformers adds up the best two experts of a group, whatever k is.
  const int64_t counted =
      (experts.num_experts_per_tok + experts.route_nodes - 1) / experts.route_nodes;
  if (experts.expert_nodes > 1 && counted != 2) {
    usage_error(
        "{}: num_experts_per_tok={} over topk_group={} must be 2, rounded up: so many experts "
        "say how good a group is; supported otherwise: n_group=1",
        fields.where(), experts.num_experts_per_tok, experts.route_nodes);
  }
  return experts;
}

/// Of "deepseek_v3".
HfLatentAttention read_latent_attention(const Fields& fields) {
  HfLatentAttention latent;
  // null says that there is none, and silence what the first DeepSeek-V3 has.
  latent.q_lora_rank =
      fields.is_null("q_lora_rank") ? 0 : fields.integer("q_lora_rank", 1536, 1, kMaxWidth);
  latent.kv_lora_rank = fields.integer("kv_lora_rank", 512, 1, kMaxWidth);
  latent.qk_nope_head_dim = fields.integer("qk_nope_head_dim", 128, 1, kMaxWidth);
  latent.qk_rope_head_dim = fields.integer("qk_rope_head_dim", 64, 1, kMaxWidth);
  latent.v_head_dim = fields.integer("v_head_dim", 128, 1, kMaxWidth);
  latent.rope_interleave = fields.boolean("rope_interleave", !fields.is_null("rope_interleave"));
  latent.rms_norm_eps = 1e-6;  // whatever config.json says of the other norms
  const int64_t head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim;
  if (latent.qk_rope_head_dim % 2 != 0) {
    usage_error("{}: qk_rope_head_dim={} must be even: RoPE turns pairs of channels",
                fields.where(), latent.qk_rope_head_dim);
  }
  if (latent.v_head_dim > head_dim) {
    usage_error(
        "{}: v_head_dim={} must be at most qk_nope_head_dim + qk_rope_head_dim={}: attention pads "
        "a value to the width of a key",
        fields.where(), latent.v_head_dim, head_dim);
  }
  return latent;
}

/// The RoPE settings under their new name, rope_parameters, or the old one, rope_scaling. An empty
/// object says nothing. nullptr: neither.
const Json* rope_settings(const Fields& fields, const char** name) {
  const Json* found = nullptr;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const Json* value = fields.find(key);
    if (value == nullptr || (value->is_object() && value->empty())) continue;
    if (found != nullptr) {
      usage_error("{}: {} and rope_scaling say the same thing; keep one", fields.where(), *name);
    }
    found = value;
    *name = key;
  }
  return found;
}

/// What the settings of "yarn" have of their own.
void read_yarn(const Fields& rope, HfConfig& config) {
  constexpr double kMost = 1e6;
  RopeScaling& scaling = config.rope_scaling;
  if (!(config.rope_theta > 1)) {
    usage_error("{}: rope_theta={} must be above 1: all waves of rope_type \"yarn\" are as long",
                rope.where(), config.rope_theta);
  }
  scaling.rope_beta_slow = rope.number("beta_slow", 1, 1e-6, kMost);
  scaling.rope_beta_fast = rope.number("beta_fast", 32, 0, kMost);
  if (!(scaling.rope_beta_fast > scaling.rope_beta_slow)) {
    usage_error("{}: beta_fast={} must be above beta_slow={}", rope.where(), scaling.rope_beta_fast,
                scaling.rope_beta_slow);
  }
  scaling.rope_mscale = rope.number("mscale", 0, 0, kMost);
  scaling.rope_mscale_all_dim = rope.number("mscale_all_dim", 0, 0, kMost);
  rope.only("truncate", true, "is not supported: pairs of channels are blended in whole numbers");
  rope.absent("attention_factor",
              "is not supported: it follows from factor, mscale and mscale_all_dim; leave it out");
}

void read_rope(const Fields& fields, HfConfig& config, const Family& family) {
  const char* name = nullptr;
  const Json* settings = rope_settings(fields, &name);
  config.rope_theta = fields.number("rope_theta", family.rope_theta, 1, HUGE_VAL);
  if (settings == nullptr) return;
  const Fields rope(*settings, fmt::format("{}: {}", fields.where(), name));
  config.rope_theta = rope.number("rope_theta", config.rope_theta, 1, HUGE_VAL);
  rope.only("partial_rotary_factor", 1, "is not supported: RoPE turns every channel");
  const char* type_key = rope.find("rope_type") != nullptr ? "rope_type" : "type";
  const std::string type = rope.text(type_key);
  RopeScaling& scaling = config.rope_scaling;
  if (type.empty() || type == "default") return;
  if (type != "linear" && type != "llama3" && type != "yarn") {
    rope.refuse(type_key, *rope.find(type_key),
                "is not supported; supported: \"default\", \"linear\", \"llama3\" and \"yarn\"");
  }
  scaling.rope_type = type;
  scaling.rope_factor = rope.number("factor", {}, 1, HUGE_VAL);
  if (type != "yarn")
    rope.only("mscale_all_dim", 0, "is not supported: it is of rope_type \"yarn\"");
  if (type == "linear") return;
  if (type == "yarn") {
    read_yarn(rope, config);
  } else {
    scaling.rope_low_freq_factor = rope.number("low_freq_factor", {}, 0, HUGE_VAL);
    scaling.rope_high_freq_factor = rope.number(
        "high_freq_factor", {}, std::nextafter(scaling.rope_low_freq_factor, HUGE_VAL), HUGE_VAL);
  }
  constexpr const char* kOriginal = "original_max_position_embeddings";
  const Fields& source = fields.find(kOriginal) != nullptr ? fields : rope;
  scaling.rope_original_max_position_embeddings =
      source.integer(kOriginal, config.max_position_embeddings, 1, int64_t{1} << 40);
}

/// Throws UsageError where the numbers of heads do not go together.
void check_heads(const Fields& fields, const HfConfig& config) {
  const bool latent = config.latent.kv_lora_rank > 0;
  if (latent && config.num_kv_heads != config.num_heads) {
    usage_error(
        "{}: num_key_value_heads={} is not supported: latent attention makes a key and a value for "
        "each of num_attention_heads={}; supported: {}",
        fields.where(), config.num_kv_heads, config.num_heads, config.num_heads);
  }
  if (config.num_heads % config.num_kv_heads != 0) {
    usage_error("{}: num_key_value_heads={} must divide num_attention_heads={}", fields.where(),
                config.num_kv_heads, config.num_heads);
  }
  if (latent) return;
  if (fields.find("head_dim") == nullptr && config.hidden_size % config.num_heads != 0) {
    usage_error("{}: num_attention_heads={} must divide hidden_size={}, or head_dim be given",
                fields.where(), config.num_heads, config.hidden_size);
  }
  if (config.head_dim % 2 != 0) {
    usage_error("{}: head_dim={} must be even: RoPE turns pairs of channels", fields.where(),
                config.head_dim);
  }
}

}  // namespace

HfConfig parse_hf_config(std::string_view text, const std::string& file) {
  if (std::ssize(text) > kMaxFileBytes) {
    usage_error("{}: {} bytes are more than a config.json has", file, text.size());
  }
  const Json json = parse_json(text, file);
  const Fields fields(json, file);
  const Family& family = family_of(fields);
  refuse_unsupported(fields, family);
  HfConfig config;
  config.model_type = family.model_type;
  config.hidden_size = fields.integer("hidden_size", {}, 1, kMaxWidth);
  config.num_layers = fields.integer("num_hidden_layers", {}, 1, 10'000);
  config.num_heads = fields.integer("num_attention_heads", {}, 1, kMaxWidth);
  const bool own_kv_heads = family.num_kv_heads == 0 || fields.is_null("num_key_value_heads");
  const int64_t kv_heads = own_kv_heads ? config.num_heads : family.num_kv_heads;
  config.num_kv_heads = fields.integer("num_key_value_heads", kv_heads, 1, kMaxWidth);
  config.head_dim = fields.integer(
      "head_dim", std::max<int64_t>(1, config.hidden_size / config.num_heads), 1, kMaxWidth);
  config.ffn_hidden_size = fields.integer("intermediate_size", {}, 1, kMaxWidth);
  config.vocab_size = fields.integer("vocab_size", {}, 2, INT32_MAX);
  config.max_position_embeddings = fields.integer(
      "max_position_embeddings", family.max_position_embeddings, 1, int64_t{1} << 40);
  config.rms_norm_eps = fields.number("rms_norm_eps", family.rms_norm_eps, 0, 1);
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings", false);
  config.byte_tokens = fields.boolean("byte_tokens", false);
  if (config.model_type == "mixtral") config.experts = read_mixtral_experts(fields);
  if (config.model_type == "deepseek_v3") {
    config.experts = read_deepseek_experts(fields, config.num_layers);
    config.latent = read_latent_attention(fields);
    config.head_dim = config.latent.qk_nope_head_dim + config.latent.qk_rope_head_dim;
    config.predicting_layers = fields.integer("num_nextn_predict_layers", 1, 0, 10'000);
  }
  read_rope(fields, config, family);
  check_heads(fields, config);
  return config;
}

HfConfig read_hf_config(const std::string& directory) {
  const std::filesystem::path path = std::filesystem::path(directory) / "config.json";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    usage_error(
        "model={}: the directory has no config.json; Hugging Face's model directories hold "
        "config.json and model.safetensors, or model.safetensors.index.json and the files it "
        "names",
        directory);
  }
  const MappedFile file(path.string());
  return parse_hf_config(file.text(), path.string());
}

}  // namespace usp
