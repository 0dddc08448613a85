#include "files/hf_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <optional>
#include <set>

#include "base/json_reader.h"
#include "base/mapped_file.h"
#include "files/file_kind.h"

namespace usp {

namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxWidth = int64_t{1} << 24;  // of any axis; products stay far below 2^63
constexpr int64_t kMaxFileBytes = int64_t{1} << 20;

/// A value as it stands in the file, shortened.
std::string shown(const Json& json, size_t max_length = 60) {
  std::string text =
      json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  return text.size() > max_length ? text.substr(0, max_length) + "..." : text;
}

/// Whoever wrote the file need not have written a name.
std::string shown_key(const std::string& key) {
  const bool plain = key.size() <= 60 && std::ranges::all_of(key, [](char c) {
                       return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.';
                     });
  return plain ? key : shown(key);
}

/// Whether a word stands in a text of words that blanks separate.
bool is_among(std::string_view word, std::string_view words) {
  return fmt::format(" {} ", words).find(fmt::format(" {} ", word)) != std::string::npos;
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
    read_.insert(key);
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }

  /// Where the key stands in the file, but with the value null.
  bool is_null(const char* key) const { return json_.contains(key) && json_.at(key).is_null(); }

  /// Calls see(key, value) for each key whose value is not null.
  template <class See>
  void for_each(const See& see) const {
    for (const auto& [key, value] : json_.items()) {
      if (!value.is_null()) see(key, value);
    }
  }
  bool was_read(const std::string& key) const { return read_.contains(key); }

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

  [[noreturn]] void refuse(const std::string& key, const Json& value,
                           const std::string& rule) const {
    usage_error("{}: {}={} {}", where_, shown_key(key), shown(value), rule);
  }

 private:
  const Json* find_or_refuse(const char* key, bool optional) const {
    const Json* value = find(key);
    if (value == nullptr && !optional) usage_error("{}: {} is missing", where_, key);
    return value;
  }

  const Json& json_;
  std::string where_;
  mutable std::set<std::string> read_;
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
    {"mistral", "MistralForCausalLM", 8, 131072, 1e4, 1e-6},
    {"mixtral", "MixtralForCausalLM", 8, 131072, 1e6, 1e-5},
    {"deepseek_v3", "DeepseekV3ForCausalLM", 128, 4096, 1e4, 1e-6},
};

/// Kinds of models that people have, and what of each is not computed here.
constexpr HfOtherKind kOthers[] = {
    {"apertus", "queries and keys have norms, the MLP has xIELU and no gate"},
    {"arcee", "the MLP has a squared ReLU and no gate"},
    {"baichuan", "queries, keys and values are stored as one tensor"},
    {"bamba", "most layers are state-space models"},
    {"bart", "it has an encoder beside the decoder"},
    {"bert", "attention sees later tokens, it has LayerNorm, biases, GELU, and learned positions"},
    {"bitnet",
     "weights have three values, norms stand before the last projections, the MLP has a squared "
     "ReLU"},
    {"bloom", "it has LayerNorm, biases, GELU, and ALiBi in the place of RoPE"},
    {"chatglm",
     "projections are stored as one tensor, queries, keys and values have biases, and RoPE turns a "
     "part of the channels"},
    {"codegen", "it has LayerNorm, biases, GELU, and attention and MLP side by side"},
    {"cohere",
     "attention and MLP stand side by side behind one LayerNorm, RoPE turns neighboring channels, "
     "logits are scaled"},
    {"cohere2",
     "attention and MLP stand side by side behind one LayerNorm, RoPE turns neighboring channels, "
     "logits are scaled, layers have a window or no RoPE"},
    {"dbrx", "it has LayerNorm, queries, keys and values are clipped and stored as one tensor"},
    {"deepseek_v2",
     "a softmax scores the experts, whose gates need not add up to 1, and no bias balances them"},
    {"deepseek_v32", "an indexer chooses the tokens that attention sees"},
    {"distilbert",
     "attention sees later tokens, it has LayerNorm, biases, GELU, and learned positions"},
    {"dots1", "queries and keys have norms"},
    {"ernie4_5", "RoPE turns neighboring channels, projections may have biases"},
    {"ernie4_5_moe", "RoPE turns neighboring channels, a softmax scores the experts"},
    {"exaone4",
     "queries and keys have norms, norms follow attention and MLP, layers have a window or no "
     "RoPE"},
    {"falcon", "it has LayerNorm and GELU, queries, keys and values are stored as one tensor"},
    {"falcon_h1", "layers have a state-space model beside attention, and multipliers"},
    {"falcon_mamba", "its layers are state-space models"},
    {"flex_olmo", "norms follow attention and MLP, queries and keys have norms"},
    {"gemma", "norms multiply by 1 + weight, the MLP has GELU, embeddings are scaled"},
    {"gemma2", "scores are capped, norms follow attention and MLP, layers have a window"},
    {"gemma3", "it reads pictures, queries and keys have norms, layers have a window"},
    {"gemma3_text", "queries and keys have norms, layers have a window"},
    {"gemma3n", "it reads pictures and sound, and layers have embeddings of their own"},
    {"glm",
     "queries, keys and values have biases, RoPE turns a part of the channels, neighbors as pairs, "
     "the MLP's projections are stored as one tensor"},
    {"glm4",
     "queries, keys and values have biases, norms follow attention and MLP, RoPE turns a part of "
     "the channels, neighbors as pairs"},
    {"glm4_moe",
     "queries, keys and values have biases, queries and keys may have norms, RoPE turns a part of "
     "the channels"},
    {"gpt2", "it has LayerNorm, biases, GELU, and learned positions"},
    {"gpt_bigcode",
     "it has LayerNorm, biases, GELU, learned positions, and one key and value for all heads"},
    {"gpt_neo", "it has LayerNorm, biases, GELU, learned positions, and layers with a window"},
    {"gpt_neox", "it has LayerNorm, biases, GELU, and RoPE on a part of the channels"},
    {"gpt_oss", "it has biases, sinks of attention, and layers with a window"},
    {"gptj",
     "it has LayerNorm, biases, GELU, RoPE on a part of the channels, and attention and MLP side "
     "by side"},
    {"granite", "embeddings, scores, residuals and logits are multiplied by constants"},
    {"granitemoe",
     "embeddings, scores, residuals and logits are multiplied by constants, experts are stored as "
     "one tensor"},
    {"granitemoehybrid",
     "most layers are state-space models; embeddings, scores, residuals and logits are multiplied "
     "by constants"},
    {"granitemoeshared",
     "embeddings, scores, residuals and logits are multiplied by constants, experts are stored as "
     "one tensor"},
    {"helium", "RoPE turns neighboring channels"},
    {"hunyuan_v1_dense", "queries and keys have norms behind RoPE"},
    {"hunyuan_v1_moe", "queries and keys have norms behind RoPE"},
    {"internlm2", "queries, keys and values are stored as one tensor"},
    {"jais", "it has LayerNorm, biases, ALiBi, and scaled embeddings"},
    {"jamba", "most layers are state-space models"},
    {"jetmoe", "attention is a mixture of experts"},
    {"lfm2", "most layers are short convolutions, queries and keys have norms"},
    {"llama4", "it reads pictures; layers have no RoPE or attention in chunks"},
    {"llama4_text",
     "layers have no RoPE or attention in chunks, queries and keys have norms, a sigmoid gates the "
     "experts' inputs"},
    {"mamba", "its layers are state-space models"},
    {"mamba2", "its layers are state-space models"},
    {"minicpm", "embeddings, residuals and logits are scaled"},
    {"minicpm3",
     "embeddings, residuals and logits are scaled, keys and values are made of latents"},
    {"minimax", "most layers have linear attention"},
    {"minimax_m2", "queries and keys have norms, RoPE turns a part of the channels"},
    {"ministral", "layers have a window"},
    {"mistral3", "it reads pictures"},
    {"mllama", "it reads pictures, which layers of their own attend to"},
    {"modernbert", "attention sees later tokens, it has LayerNorm and GELU"},
    {"mpt", "it has LayerNorm, GELU, and ALiBi in the place of RoPE"},
    {"nemotron",
     "LayerNorm multiplies by 1 + weight, the MLP has a squared ReLU and no gate, RoPE turns a "
     "part of the channels"},
    {"nemotron_h", "most layers are state-space models"},
    {"olmo", "LayerNorm has no weights, queries, keys and values may be clipped"},
    {"olmo2", "norms follow attention and MLP, queries and keys have norms"},
    {"olmo3", "norms follow attention and MLP, queries and keys have norms, layers have a window"},
    {"olmoe", "queries and keys have norms"},
    {"opt", "it has LayerNorm, biases, ReLU, and learned positions"},
    {"persimmon", "it has LayerNorm, biases, a squared ReLU, and norms of queries and keys"},
    {"phi",
     "attention and MLP stand side by side behind one LayerNorm, it has biases and GELU, RoPE "
     "turns a part of the channels"},
    {"phi3", "projections are stored as one tensor"},
    {"phi3_v", "it reads pictures, and projections are stored as one tensor"},
    {"phi4mm", "it reads pictures and sound, and projections are stored as one tensor"},
    {"phimoe", "it has LayerNorm and biases, and its router chooses by two masked softmaxes"},
    {"plamo", "attention and MLP stand side by side behind one norm"},
    {"qwen", "queries, keys and values are stored as one tensor, and have biases"},
    {"qwen2", "queries, keys and values have biases"},
    {"qwen2_5_vl", "it reads pictures; queries, keys and values have biases"},
    {"qwen2_moe", "queries, keys and values have biases, a sigmoid gates the shared experts"},
    {"qwen2_vl", "it reads pictures; queries, keys and values have biases"},
    {"qwen3", "queries and keys have norms"},
    {"qwen3_moe", "queries and keys have norms"},
    {"qwen3_next", "most layers have linear attention, norms multiply by 1 + weight"},
    {"recurrent_gemma", "most layers are recurrent"},
    {"roberta",
     "attention sees later tokens, it has LayerNorm, biases, GELU, and learned positions"},
    {"rwkv", "its layers are recurrent"},
    {"seed_oss", "queries, keys and values have biases"},
    {"smollm3", "some layers have no RoPE"},
    {"stablelm", "it has LayerNorm, and RoPE on a part of the channels"},
    {"starcoder2", "it has LayerNorm, biases, and GELU"},
    {"t5",
     "it has an encoder beside the decoder, and learned biases of positions in the place of RoPE"},
    {"xglm", "it has LayerNorm, biases, GELU, and positions of sines"},
    {"zamba2", "most layers are state-space models"},
};

constexpr const char* kSupported =
    "supported: \"llama\", \"mistral\", \"mixtral\" and \"deepseek_v3\"";
constexpr const char* kAll = "llama mistral mixtral deepseek_v3";
constexpr const char* kWindow = "is not supported: attention reaches back to the start";
constexpr const char* kDense = "is not supported: the MLP of this kind of model is dense";
constexpr const char* kBias = "is not supported: projections have no biases";

constexpr HfKey kKeys[] = {
    {"model_type", kAll, HfKey::used},
    {"architectures", kAll, HfKey::used},
    {"hidden_size", kAll, HfKey::used},
    {"num_hidden_layers", kAll, HfKey::used},
    {"num_attention_heads", kAll, HfKey::used},
    {"num_key_value_heads", kAll, HfKey::used},
    {"head_dim", "llama mistral mixtral", HfKey::used},
    {"head_dim", "deepseek_v3", HfKey::harmless},  // transformers sets it, and computes without it
    {"intermediate_size", kAll, HfKey::used},
    {"vocab_size", kAll, HfKey::used},
    {"max_position_embeddings", kAll, HfKey::used},
    {"rms_norm_eps", kAll, HfKey::used},
    {"tie_word_embeddings", kAll, HfKey::used},
    {"rope_theta", kAll, HfKey::used},
    {"rope_parameters", kAll, HfKey::used},
    {"rope_scaling", kAll, HfKey::used},
    {"original_max_position_embeddings", kAll, HfKey::used},
    {"byte_tokens", kAll, HfKey::used},
    {"sliding_window", "mistral mixtral", HfKey::used},
    {"num_local_experts", "mixtral", HfKey::used},
    {"num_experts_per_tok", "mixtral deepseek_v3", HfKey::used},
    {"n_routed_experts", "deepseek_v3", HfKey::used},
    {"moe_intermediate_size", "deepseek_v3", HfKey::used},
    {"n_shared_experts", "deepseek_v3", HfKey::used},
    {"first_k_dense_replace", "deepseek_v3", HfKey::used},
    {"norm_topk_prob", "deepseek_v3", HfKey::used},
    {"routed_scaling_factor", "deepseek_v3", HfKey::used},
    {"n_group", "deepseek_v3", HfKey::used},
    {"topk_group", "deepseek_v3", HfKey::used},
    {"q_lora_rank", "deepseek_v3", HfKey::used},
    {"kv_lora_rank", "deepseek_v3", HfKey::used},
    {"qk_nope_head_dim", "deepseek_v3", HfKey::used},
    {"qk_rope_head_dim", "deepseek_v3", HfKey::used},
    {"qk_head_dim", "deepseek_v3", HfKey::used},
    {"v_head_dim", "deepseek_v3", HfKey::used},
    {"rope_interleave", "deepseek_v3", HfKey::used},
    {"num_nextn_predict_layers", "deepseek_v3", HfKey::used},

    {"hidden_act", kAll, HfKey::only, "\"silu\"", "is not supported: the MLP is SwiGLU"},
    {"attention_bias", kAll, HfKey::only, "false", kBias},
    {"mlp_bias", kAll, HfKey::only, "false", kBias},
    {"attention_dropout", kAll, HfKey::only, "0", "is not supported: there is no dropout"},
    {"pretraining_tp", kAll, HfKey::only, "1",
     "is not supported: it computes projections in slices"},
    {"partial_rotary_factor", kAll, HfKey::only, "1", "is not supported: RoPE turns every channel"},
    {"rope_interleaved", "llama mistral mixtral", HfKey::only, "false",
     "is not supported: RoPE turns channels that are half a head apart"},
    {"is_encoder_decoder", kAll, HfKey::only, "false", "is not supported"},
    {"add_cross_attention", kAll, HfKey::only, "false", "is not supported"},
    {"pruned_heads", kAll, HfKey::only, "{}", "is not supported: all heads are there"},
    {"use_sliding_window", kAll, HfKey::only, "false", kWindow},
    {"router_jitter_noise", "mixtral", HfKey::only, "0", "is not supported: routers add no noise"},
    {"scoring_func", "deepseek_v3", HfKey::only, "\"sigmoid\"", "is not supported"},
    {"topk_method", "deepseek_v3", HfKey::only, "\"noaux_tc\"",
     "is not supported: a bias balances the experts"},
    {"moe_layer_freq", "deepseek_v3", HfKey::only, "1",
     "is not supported: from the first layer with experts on, all have"},

    {"sliding_window", "llama deepseek_v3", HfKey::absent, "null", kWindow},
    {"layer_types", kAll, HfKey::absent, "null", "is not supported: all layers are alike"},
    {"quantization_config", kAll, HfKey::absent, "null",
     "is not supported: weights must be F32, BF16, F16 or F64"},
    {"num_local_experts", "llama mistral", HfKey::absent, "null", kDense},
    {"n_routed_experts", "llama mistral", HfKey::absent, "null", kDense},
    {"auto_map", "llama mistral mixtral", HfKey::absent, "null",
     "is not supported: it names code of the model's own, which nobody has compared"},

    // Where the file comes from, and how numbers and tokens are stored.
    {"_name_or_path", kAll, HfKey::harmless},
    {"_commit_hash", kAll, HfKey::harmless},
    {"transformers_version", kAll, HfKey::harmless},
    {"transformers.js_config", kAll, HfKey::harmless},
    {"torch_dtype", kAll, HfKey::harmless},
    {"dtype", kAll, HfKey::harmless},
    {"use_bfloat16", kAll, HfKey::harmless},
    {"auto_map", "deepseek_v3", HfKey::harmless},  // of the time before transformers had it
    {"is_llama_config", kAll, HfKey::harmless},
    {"unsloth_fixed", kAll, HfKey::harmless},
    {"unsloth_version", kAll, HfKey::harmless},
    {"tokenizer_class", kAll, HfKey::harmless},
    {"prefix", kAll, HfKey::harmless},
    {"bos_token_id", kAll, HfKey::harmless},
    {"eos_token_id", kAll, HfKey::harmless},
    {"pad_token_id", kAll, HfKey::harmless},
    {"sep_token_id", kAll, HfKey::harmless},
    {"unk_token_id", kAll, HfKey::harmless},
    {"decoder_start_token_id", kAll, HfKey::harmless},

    // How it was made, or trained.
    {"initializer_range", kAll, HfKey::harmless},
    {"gradient_checkpointing", kAll, HfKey::harmless},
    {"problem_type", kAll, HfKey::harmless},
    {"finetuning_task", kAll, HfKey::harmless},
    {"task_specific_params", kAll, HfKey::harmless},
    {"id2label", kAll, HfKey::harmless},
    {"label2id", kAll, HfKey::harmless},
    {"num_labels", kAll, HfKey::harmless},
    {"router_aux_loss_coef", "mixtral deepseek_v3", HfKey::harmless},
    {"aux_loss_alpha", "deepseek_v3", HfKey::harmless},
    {"seq_aux", "deepseek_v3", HfKey::harmless},
    {"ep_size", "deepseek_v3", HfKey::harmless},

    // How the same is computed, and what is given back of it.
    {"use_cache", kAll, HfKey::harmless},
    {"attn_implementation", kAll, HfKey::harmless},
    {"_attn_implementation", kAll, HfKey::harmless},
    {"_attn_implementation_autoset", kAll, HfKey::harmless},
    {"_flash_attn_2_enabled", kAll, HfKey::harmless},
    {"experts_implementation", kAll, HfKey::harmless},
    {"chunk_size_feed_forward", kAll, HfKey::harmless},
    {"is_decoder", kAll, HfKey::harmless},
    {"tie_encoder_decoder", kAll, HfKey::harmless},
    {"cross_attention_hidden_size", kAll, HfKey::harmless},
    {"output_attentions", kAll, HfKey::harmless},
    {"output_hidden_states", kAll, HfKey::harmless},
    {"output_router_logits", kAll, HfKey::harmless},
    {"return_dict", kAll, HfKey::harmless},
    {"torchscript", kAll, HfKey::harmless},
    {"tf_legacy_loss", kAll, HfKey::harmless},

    // How text is generated; the flags of a run say that here.
    {"max_length", kAll, HfKey::harmless},
    {"min_length", kAll, HfKey::harmless},
    {"do_sample", kAll, HfKey::harmless},
    {"temperature", kAll, HfKey::harmless},
    {"top_k", kAll, HfKey::harmless},
    {"top_p", kAll, HfKey::harmless},
    {"typical_p", kAll, HfKey::harmless},
    {"early_stopping", kAll, HfKey::harmless},
    {"num_beams", kAll, HfKey::harmless},
    {"num_beam_groups", kAll, HfKey::harmless},
    {"num_return_sequences", kAll, HfKey::harmless},
    {"diversity_penalty", kAll, HfKey::harmless},
    {"repetition_penalty", kAll, HfKey::harmless},
    {"length_penalty", kAll, HfKey::harmless},
    {"exponential_decay_length_penalty", kAll, HfKey::harmless},
    {"no_repeat_ngram_size", kAll, HfKey::harmless},
    {"encoder_no_repeat_ngram_size", kAll, HfKey::harmless},
    {"bad_words_ids", kAll, HfKey::harmless},
    {"forced_bos_token_id", kAll, HfKey::harmless},
    {"forced_eos_token_id", kAll, HfKey::harmless},
    {"suppress_tokens", kAll, HfKey::harmless},
    {"begin_suppress_tokens", kAll, HfKey::harmless},
    {"remove_invalid_values", kAll, HfKey::harmless},
    {"output_scores", kAll, HfKey::harmless},
    {"return_dict_in_generate", kAll, HfKey::harmless},
};

const HfKey* row_of(const std::string& key, const Family& family) {
  for (const HfKey& row : kKeys) {
    if (row.key == key && row.is_of(family.model_type)) return &row;
  }
  return nullptr;
}

/// What the file says that a kind of model does not have, of the kind of which that is the least.
struct Strange {
  const Family* family = nullptr;
  std::vector<std::string> keys;  ///< with their values
};

bool is_harmless(const std::string& key) {
  return std::ranges::any_of(
      kKeys, [&](const HfKey& row) { return row.key == key && row.rule == HfKey::harmless; });
}

Strange strange_keys(const Fields& fields) {
  Strange least;
  for (const Family& family : kFamilies) {
    Strange here{&family, {}};
    fields.for_each([&](const std::string& key, const Json& value) {
      const HfKey* row = row_of(key, family);
      const bool differs = row == nullptr               ? !is_harmless(key)
                           : row->rule == HfKey::absent ? true
                           : row->rule == HfKey::only   ? value != Json::parse(row->allowed)
                                                        : false;
      if (differs) here.keys.push_back(fmt::format("{}={}", shown_key(key), shown(value, 24)));
    });
    if (least.family == nullptr || here.keys.size() < least.keys.size()) least = std::move(here);
  }
  return least;
}

/// Refuses a kind of model that is not computed here: by what is known of it, and by what of its
/// keys the nearest kind that is computed does not have.
[[noreturn]] void refuse_kind(const Fields& fields, const std::string& model_type) {
  const auto other = std::ranges::find(kOthers, model_type, &HfOtherKind::model_type);
  const bool known = other != std::end(kOthers);
  auto [family, keys] = strange_keys(fields);
  std::string rule = known ? fmt::format("is not supported: {}", other->difference)
                           : std::string("is not known here");
  constexpr size_t kMost = 8;
  const size_t more = keys.size() - std::min(keys.size(), kMost);
  keys.resize(keys.size() - more);
  if (!keys.empty()) {
    rule += fmt::format("; a \"{}\" does not have {}{}", family->model_type, fmt::join(keys, ", "),
                        more == 0 ? "" : fmt::format(" and {} more", more));
  } else if (!known) {
    rule += fmt::format("; its keys are those of a \"{}\", so what differs is in its code",
                        family->model_type);
  }
  fields.refuse("model_type", *fields.find("model_type"), fmt::format("{}; {}", rule, kSupported));
}

const Family& family_of(const Fields& fields) {
  if (fields.find("model_type") == nullptr) {
    usage_error("{}: model_type is missing; {}", fields.where(), kSupported);
  }
  const std::string model_type = fields.text("model_type");
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return family;
  }
  refuse_kind(fields, model_type);
}

/// What transformers can do and the model here does not.
void refuse_unsupported(const Fields& fields, const Family& family) {
  fields.for_each([&](const std::string& key, const Json& value) {
    const HfKey* row = row_of(key, family);
    if (row == nullptr) {
      fields.refuse(key, value,
                    fmt::format("is not known of a \"{}\", so it may change what the model "
                                "computes; leave it out if it does not",
                                family.model_type));
    }
    if (row->rule == HfKey::absent) fields.refuse(key, value, row->reason);
    if (row->rule == HfKey::only) fields.only(row->key, Json::parse(row->allowed), row->reason);
  });
  const Json* architectures = fields.find("architectures");
  const Json supported = Json::array({family.architecture});
  if (architectures != nullptr && *architectures != supported) {
    fields.refuse("architectures", *architectures,
                  fmt::format("is not supported; supported: {}", shown(supported)));
  }
}

/// A key that is used has been read by now, unless another one takes its effect away.
void refuse_unread(const Fields& fields, const Family& family) {
  fields.for_each([&](const std::string& key, const Json& value) {
    const HfKey* row = row_of(key, family);
    if (row == nullptr || row->rule != HfKey::used || fields.was_read(key)) return;
    fields.refuse(key, value, "has no effect beside the other keys; leave it out");
  });
}

/// A window that is as long as the longest text changes nothing. null says that there is none, and
/// silence what the first Mistral has.
void check_window(const Fields& fields, const HfConfig& config, const Family& family) {
  constexpr const char* kKey = "sliding_window";
  if (row_of(kKey, family)->rule != HfKey::used || fields.is_null(kKey)) return;
  const int64_t longest = config.max_position_embeddings;
  const int64_t window =
      fields.integer(kKey, config.model_type == "mistral" ? 4096 : longest, 1, int64_t{1} << 40);
  if (window >= longest) return;
  usage_error(
      "{}: {}={}{} is not supported, as it is shorter than max_position_embeddings={}: attention "
      "reaches back to the start; set max_position_embeddings={}, below which a window has no "
      "effect",
      fields.where(), kKey, window, fields.find(kKey) == nullptr ? " (what its absence means)" : "",
      longest, window);
}

constexpr int64_t kMaxExperts = 1 << 16;

/// Experts of "mixtral".
HfExperts read_mixtral_experts(const Fields& fields) {
  HfExperts experts;
  experts.num_experts = fields.integer("num_local_experts", 8, 1, kMaxExperts);
  experts.num_experts_per_tok = fields.integer("num_experts_per_tok", 2, 1, experts.num_experts);
  experts.moe_ffn_hidden_size = fields.integer("intermediate_size", {}, 1, kMaxWidth);
  experts.norm_topk_prob = true;
  return experts;
}

/// Experts of "deepseek_v3".
HfExperts read_deepseek_experts(const Fields& fields, int64_t num_layers) {
  HfExperts experts;
  experts.num_experts = fields.integer("n_routed_experts", 256, 1, kMaxExperts);
  experts.num_experts_per_tok = fields.integer("num_experts_per_tok", 8, 1, experts.num_experts);
  experts.moe_ffn_hidden_size = fields.integer("moe_intermediate_size", 2048, 1, kMaxWidth);
  experts.num_shared_experts = fields.integer("n_shared_experts", 1, 0, 1 << 10);
  experts.first_dense_layers = fields.integer("first_k_dense_replace", 3, 0, num_layers);
  experts.router_score = "sigmoid";
  experts.norm_topk_prob = fields.boolean("norm_topk_prob", true);
  experts.routed_scaling_factor = fields.number("routed_scaling_factor", 2.5, 1e-6, 1e6);
  experts.expert_nodes = fields.integer("n_group", 8, 1, experts.num_experts);
  experts.route_nodes = fields.integer("topk_group", 4, 1, experts.expert_nodes);
  experts.choice_bias = true;
  if (experts.first_dense_layers == num_layers) return {};
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

/// Latent attention of "deepseek_v3".
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
  if (fields.integer("qk_head_dim", head_dim, 1, 2 * kMaxWidth) != head_dim) {
    usage_error("{}: qk_head_dim={} must be qk_nope_head_dim + qk_rope_head_dim={}", fields.where(),
                shown(*fields.find("qk_head_dim")), head_dim);
  }
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

/// The keys of RoPE's settings, and the rope_types that have them.
struct RopeKey {
  std::string_view key, types;
};
constexpr RopeKey kRopeKeys[] = {
    {"rope_type", "default linear llama3 yarn"},
    {"type", "default linear llama3 yarn"},
    {"rope_theta", "default linear llama3 yarn"},
    {"partial_rotary_factor", "default linear llama3 yarn"},
    {"factor", "linear llama3 yarn"},
    {"original_max_position_embeddings", "llama3 yarn"},
    {"low_freq_factor", "llama3"},
    {"high_freq_factor", "llama3"},
    {"beta_fast", "yarn"},
    {"beta_slow", "yarn"},
    {"mscale", "yarn"},
    {"mscale_all_dim", "yarn"},
    {"truncate", "yarn"},
    {"attention_factor", "yarn"},
};

/// What the settings say they are; silence means "default".
std::string rope_type_of(const Fields& rope) {
  const Json *type = rope.find("rope_type"), *old = rope.find("type");
  if (type != nullptr && old != nullptr && *type != *old) {
    rope.refuse("type", *old, fmt::format("differs from rope_type={}; keep one", shown(*type)));
  }
  if (type == nullptr && old == nullptr) return "default";
  const char* key = type != nullptr ? "rope_type" : "type";
  const std::string name = rope.text(key);
  for (const char* known : {"default", "linear", "llama3", "yarn"}) {
    if (name == known) return name;
  }
  rope.refuse(key, *rope.find(key),
              "is not supported; supported: \"default\", \"linear\", \"llama3\" and \"yarn\"");
}

/// Refuses settings that the type does not have, some of which would change it if it had them.
void refuse_other_settings(const Fields& rope, const std::string& type) {
  rope.for_each([&](const std::string& key, const Json& value) {
    const auto row = std::ranges::find(kRopeKeys, key, &RopeKey::key);
    if (row == std::end(kRopeKeys)) {
      rope.refuse(key, value, fmt::format("is no setting of rope_type \"{}\"", type));
    }
    if (is_among(type, row->types)) return;
    rope.refuse(key, value,
                fmt::format("is no setting of rope_type \"{}\", but of {}", type, row->types));
  });
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
  if (const Json* factor = rope.find("attention_factor")) {
    rope.refuse("attention_factor", *factor,
                "is not supported: it follows from factor, mscale and mscale_all_dim; leave it "
                "out");
  }
}

/// Refuses a setting that stands outside the settings too, with another value.
void refuse_two_values(const Fields& fields, const Fields& rope, const char* key) {
  const Json *outer = fields.find(key), *inner = rope.find(key);
  if (outer == nullptr || inner == nullptr || *outer == *inner) return;
  rope.refuse(key, *inner,
              fmt::format("differs from {}={} at the top of the file; keep the one that the model "
                          "was trained with",
                          key, shown(*outer)));
}

void read_rope(const Fields& fields, HfConfig& config, const Family& family) {
  const char* name = nullptr;
  const Json* settings = rope_settings(fields, &name);
  config.rope_theta = fields.number("rope_theta", family.rope_theta, 1, HUGE_VAL);
  if (settings == nullptr) return;
  const Fields rope(*settings, fmt::format("{}: {}", fields.where(), name));
  const std::string type = rope_type_of(rope);
  refuse_other_settings(rope, type);
  refuse_two_values(fields, rope, "rope_theta");
  config.rope_theta = rope.number("rope_theta", config.rope_theta, 1, HUGE_VAL);
  rope.only("partial_rotary_factor", 1, "is not supported: RoPE turns every channel");
  RopeScaling& scaling = config.rope_scaling;
  scaling.rope_type = type;
  if (type == "default") return;
  scaling.rope_factor = rope.number("factor", {}, 1, HUGE_VAL);
  if (type == "linear") return;
  constexpr const char* kOriginal = "original_max_position_embeddings";
  refuse_two_values(fields, rope, kOriginal);
  const Fields& source = fields.find(kOriginal) != nullptr ? fields : rope;
  std::optional<int64_t> otherwise;
  if (type == "yarn") {
    read_yarn(rope, config);
    otherwise = config.max_position_embeddings;
  } else {
    scaling.rope_low_freq_factor = rope.number("low_freq_factor", {}, 0, HUGE_VAL);
    scaling.rope_high_freq_factor = rope.number(
        "high_freq_factor", {}, std::nextafter(scaling.rope_low_freq_factor, HUGE_VAL), HUGE_VAL);
  }
  scaling.rope_original_max_position_embeddings =
      source.integer(kOriginal, otherwise, 1, int64_t{1} << 40);
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

bool HfKey::is_of(std::string_view model_type) const { return is_among(model_type, model_types); }

std::span<const HfKey> hf_keys() { return kKeys; }

std::span<const HfOtherKind> hf_other_kinds() { return kOthers; }

HfConfig parse_hf_config(std::string_view text, const std::string& file) {
  if (std::ssize(text) > kMaxFileBytes) {
    usage_error("{}: {} bytes are more than a config.json has", file, text.size());
  }
  const std::string other = other_kind_than("JSON", std::as_bytes(std::span(text)), file);
  if (!other.empty()) usage_error("{}", other);
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
  } else {
    const int64_t quotient = std::max<int64_t>(1, config.hidden_size / config.num_heads);
    config.head_dim = fields.integer("head_dim", quotient, 1, kMaxWidth);
  }
  read_rope(fields, config, family);
  check_window(fields, config, family);
  check_heads(fields, config);
  refuse_unread(fields, family);
  return config;
}

HfConfig read_hf_config(const std::string& directory) {
  const std::filesystem::path path = std::filesystem::path(directory) / "config.json";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    usage_error(
        "model={}: the directory has no config.json; Hugging Face's model directories hold "
        "config.json and model.safetensors, or model.safetensors.index.json and the files it "
        "names{}",
        directory, found_instead(directory));
  }
  // Where this file lies, transformers adds the adapter to the weights.
  if (std::filesystem::exists(path.parent_path() / "adapter_config.json", error)) {
    usage_error(
        "model={}: adapter_config.json says that an adapter changes the weights beside it, and "
        "adapters are not computed here; merge the two with `merge_and_unload` of peft and save "
        "what comes out, or remove the file if they are merged already",
        directory);
  }
  const MappedFile file(path.string());
  return parse_hf_config(file.text(), path.string());
}

}  // namespace usp
