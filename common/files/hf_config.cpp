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

/// What transformers can do and the model here does not.
void refuse_unsupported(const Fields& fields) {
  const Json* architectures = fields.find("architectures");
  if (architectures != nullptr && *architectures != Json({"LlamaForCausalLM"})) {
    fields.refuse("architectures", *architectures,
                  "is not supported; supported: [\"LlamaForCausalLM\"]");
  }
  if (fields.find("model_type") == nullptr) {
    usage_error("{}: model_type is missing; supported: \"llama\"", fields.where());
  }
  fields.only("model_type", "llama", "is not supported");
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
  fields.absent("num_local_experts", "is not supported: the MLP is dense");
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

void read_rope(const Fields& fields, HfConfig& config) {
  const char* name = nullptr;
  const Json* settings = rope_settings(fields, &name);
  config.rope_theta = fields.number("rope_theta", 10000, 1, HUGE_VAL);
  if (settings == nullptr) return;
  const Fields rope(*settings, fmt::format("{}: {}", fields.where(), name));
  config.rope_theta = rope.number("rope_theta", config.rope_theta, 1, HUGE_VAL);
  rope.only("partial_rotary_factor", 1, "is not supported: RoPE turns every channel");
  const char* type_key = rope.find("rope_type") != nullptr ? "rope_type" : "type";
  const std::string type = rope.text(type_key);
  RopeScaling& scaling = config.rope_scaling;
  if (type.empty() || type == "default") return;
  if (type != "linear" && type != "llama3") {
    rope.refuse(type_key, *rope.find(type_key),
                "is not supported; supported: \"default\", \"linear\" and \"llama3\"");
  }
  scaling.rope_type = type;
  scaling.rope_factor = rope.number("factor", {}, 1, HUGE_VAL);
  if (type == "linear") return;
  scaling.rope_low_freq_factor = rope.number("low_freq_factor", {}, 0, HUGE_VAL);
  scaling.rope_high_freq_factor = rope.number(
      "high_freq_factor", {}, std::nextafter(scaling.rope_low_freq_factor, HUGE_VAL), HUGE_VAL);
  constexpr const char* kOriginal = "original_max_position_embeddings";
  const Fields& source = fields.find(kOriginal) != nullptr ? fields : rope;
  scaling.rope_original_max_position_embeddings =
      source.integer(kOriginal, config.max_position_embeddings, 1, int64_t{1} << 40);
}

}  // namespace

HfConfig parse_hf_config(std::string_view text, const std::string& file) {
  if (std::ssize(text) > kMaxFileBytes) {
    usage_error("{}: {} bytes are more than a config.json has", file, text.size());
  }
  const Json json = parse_json(text, file);
  const Fields fields(json, file);
  refuse_unsupported(fields);
  HfConfig config;
  config.hidden_size = fields.integer("hidden_size", {}, 1, kMaxWidth);
  config.num_layers = fields.integer("num_hidden_layers", {}, 1, 10'000);
  config.num_heads = fields.integer("num_attention_heads", {}, 1, kMaxWidth);
  config.num_kv_heads = fields.integer("num_key_value_heads", config.num_heads, 1, kMaxWidth);
  config.head_dim = fields.integer(
      "head_dim", std::max<int64_t>(1, config.hidden_size / config.num_heads), 1, kMaxWidth);
  config.ffn_hidden_size = fields.integer("intermediate_size", {}, 1, kMaxWidth);
  config.vocab_size = fields.integer("vocab_size", {}, 2, INT32_MAX);
  config.max_position_embeddings =
      fields.integer("max_position_embeddings", 2048, 1, int64_t{1} << 40);
  config.rms_norm_eps = fields.number("rms_norm_eps", 1e-6, 0, 1);
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings", false);
  config.byte_tokens = fields.boolean("byte_tokens", false);
  read_rope(fields, config);
  if (fields.find("head_dim") == nullptr && config.hidden_size % config.num_heads != 0) {
    usage_error("{}: num_attention_heads={} must divide hidden_size={}, or head_dim be given", file,
                config.num_heads, config.hidden_size);
  }
  if (config.head_dim % 2 != 0) {
    usage_error("{}: head_dim={} must be even: RoPE turns pairs of channels", file,
                config.head_dim);
  }
  if (config.num_heads % config.num_kv_heads != 0) {
    usage_error("{}: num_key_value_heads={} must divide num_attention_heads={}", file,
                config.num_kv_heads, config.num_heads);
  }
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
