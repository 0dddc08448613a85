#include "files/hf_config.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>
#include <set>

#include "testing.h"

namespace usp::test {
namespace {

using Json = nlohmann::json;

/// The smallest config.json that says everything that must be said.
Json minimal() {
  return {{"model_type", "llama"},  {"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 48},      {"num_hidden_layers", 3},
          {"vocab_size", 100},      {"num_attention_heads", 4},
          {"intermediate_size", 60}};
}

HfConfig parse(const Json& json) { return parse_hf_config(json.dump(), "DIR/config.json"); }

HfConfig parse_with(const std::string& key, const Json& value) {
  Json json = minimal();
  json[key] = value;
  return parse(json);
}

void refused(const std::string& key, const Json& value, std::vector<std::string> parts = {}) {
  parts.insert(parts.begin(), {"DIR/config.json", key});
  CAPTURE(key, value.dump());
  check_throws<UsageError>([&] { parse_with(key, value); }, parts);
}

TEST_CASE("config.json: where it is silent, what transformers assumes holds") {
  const HfConfig config = parse(minimal());
  REQUIRE(config.hidden_size == 48);
  REQUIRE(config.num_layers == 3);
  REQUIRE(config.num_heads == 4);
  REQUIRE(config.num_kv_heads == 4);
  REQUIRE(config.head_dim == 12);
  REQUIRE(config.ffn_hidden_size == 60);
  REQUIRE(config.vocab_size == 100);
  REQUIRE(config.max_position_embeddings == 2048);
  REQUIRE(config.rope_theta == 10000);
  REQUIRE(config.rope_scaling.rope_type == "default");
  REQUIRE(config.rms_norm_eps == 1e-6);
  REQUIRE(!config.tie_word_embeddings);
  REQUIRE(!config.byte_tokens);
}

TEST_CASE("config.json: what it says holds, null says nothing, harmless keys are passed over") {
  Json json = minimal();
  json.update({{"num_key_value_heads", 2},
               {"head_dim", 16},
               {"rms_norm_eps", 1e-5},
               {"max_position_embeddings", 131072},
               {"tie_word_embeddings", true},
               {"rope_theta", 500000.0},
               {"byte_tokens", true},
               {"hidden_act", "silu"},
               {"attention_bias", false},
               {"pretraining_tp", 1},
               {"sliding_window", nullptr},
               {"quantization_config", nullptr},
               {"rope_scaling", nullptr},
               {"eos_token_id", {1, 2}},
               {"attention_dropout", 0.0},
               {"torch_dtype", "bfloat16"},
               {"use_cache", true}});
  const HfConfig config = parse(json);
  REQUIRE(config.num_kv_heads == 2);
  REQUIRE(config.head_dim == 16);
  REQUIRE(config.q_size() == 64);
  REQUIRE(config.kv_size() == 32);
  REQUIRE(config.rms_norm_eps == 1e-5);
  REQUIRE(config.max_position_embeddings == 131072);
  REQUIRE(config.tie_word_embeddings);
  REQUIRE(config.rope_theta == 500000);
  REQUIRE(config.byte_tokens);
  json["num_key_value_heads"] = nullptr;
  json["head_dim"] = nullptr;
  REQUIRE(parse(json).num_kv_heads == 4);
  REQUIRE(parse(json).head_dim == 12);
}

TEST_CASE("config.json: the RoPE settings under their new and their old name") {
  const Json llama3 = {{"rope_type", "llama3"},
                       {"factor", 32.0},
                       {"low_freq_factor", 1.5},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    Json json = minimal();
    json["rope_theta"] = 70000;
    json[name] = llama3;
    HfConfig config = parse(json);
    REQUIRE(config.rope_theta == 70000);
    REQUIRE(config.rope_scaling.rope_type == "llama3");
    REQUIRE(config.rope_scaling.rope_factor == 32);
    REQUIRE(config.rope_scaling.rope_low_freq_factor == 1.5);
    REQUIRE(config.rope_scaling.rope_high_freq_factor == 4);
    REQUIRE(config.rope_scaling.rope_original_max_position_embeddings == 8192);
    for (const auto& [key, inner, outer] :
         {std::tuple{"rope_theta", 70000, 500000},
          std::tuple{"original_max_position_embeddings", 8192, 4096}}) {
      json[key] = json[name][key] = inner;
      REQUIRE(parse(json) == config);
      json[key] = outer;
      check_throws<UsageError>([&] { parse(json); }, {fmt::format("{}: {}={}", name, key, inner),
                                                      fmt::format("{}={}", key, outer), "keep"});
      json[name].erase(key);  // one place is enough, either
      parse(json);
      json[key] = nullptr;
      json[name][key] = inner;
      parse(json);
    }
  }
  REQUIRE(
      parse_with("rope_scaling", {{"type", "linear"}, {"factor", 2}}).rope_scaling.rope_factor ==
      2);
  REQUIRE(parse_with("rope_scaling", {{"type", "linear"}, {"factor", 2}}).rope_scaling.rope_type ==
          "linear");
  REQUIRE(parse_with("rope_scaling", Json::object()).rope_scaling.rope_type == "default");
  REQUIRE(
      parse_with("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 300}}).rope_theta ==
      300);
  Json both = minimal();
  both["rope_scaling"] = both["rope_parameters"] = llama3;
  check_throws<UsageError>([&] { parse(both); }, {"rope_parameters", "rope_scaling", "keep one"});
}

TEST_CASE(
    "config.json: other architectures, and what the model here does not compute, are refused") {
  refused("architectures", {"MistralForCausalLM"}, {"MistralForCausalLM", "LlamaForCausalLM"});
  refused("architectures", {"LlamaForCausalLM", "LlamaForCausalLM"});
  refused("architectures", "LlamaForCausalLM");
  refused("model_type", nullptr, {"missing"});
  refused("hidden_act", "gelu", {"\"gelu\"", "\"silu\""});
  refused("attention_bias", true, {"true", "false"});
  refused("mlp_bias", true);
  refused("attention_dropout", 0.1, {"0.1"});
  refused("pretraining_tp", 2, {"2"});
  refused("partial_rotary_factor", 0.5, {"0.5"});
  refused("sliding_window", 4096, {"4096"});
  refused("use_sliding_window", true);
  refused("layer_types", {"full_attention"});
  refused("quantization_config", {{"bits", 4}}, {"{\"bits\":4}"});
  refused("num_local_experts", 8, {"the MLP of this kind of model is dense"});
  refused("n_routed_experts", 8);
  for (const char* type : {"dynamic", "longrope", "su"}) {
    for (const char* key : {"rope_type", "type"}) {
      refused("rope_scaling", {{key, type}, {"factor", 2}}, {type, "llama3", "yarn"});
    }
  }
  refused("rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}, {"0.5"});
  refused("rope_parameters", {{"rope_type", "linear"}}, {"factor is missing"});
  refused("rope_parameters", {{"rope_type", "linear"}, {"factor", 0.5}}, {"factor=0.5"});
  refused("rope_parameters",
          {{"rope_type", "llama3"}, {"factor", 8}, {"low_freq_factor", 4}, {"high_freq_factor", 4}},
          {"high_freq_factor=4"});
  refused("rope_parameters", {{"rope_type", 3}}, {"rope_type=3", "text"});
  refused("rope_parameters", {{"rope_type", ""}, {"factor", 2}}, {"rope_type=\"\""});
  refused("rope_parameters", {1, 2}, {"[1,2]", "no JSON object"});
}

TEST_CASE("config.json: each other kind of model is refused by what differs, and by its own keys") {
  const auto all = hf_other_kinds();
  REQUIRE(all.size() > 80);
  std::set<std::string> seen;
  for (const auto& [model_type, difference] : all) {
    CAPTURE(model_type);
    REQUIRE(seen.insert(model_type).second);  // it has one row, which is found
    REQUIRE(std::string(difference).size() > 8);
    const std::string said = fmt::format(
        "model_type=\"{}\" is not supported: {}; supported: "
        "\"llama\", \"mistral\", \"mixtral\" and \"deepseek_v3\"",
        model_type, difference);
    refused("model_type", model_type, {said});
    // What no table knows is named all the same, and what is harmless is not.
    Json json = minimal();
    json.update({{"model_type", model_type},
                 {"architectures", {"AnotherForCausalLM"}},
                 {"logit_scale", 0.0625},
                 {"hidden_act", "gelu"},
                 {"torch_dtype", "float16"},
                 {"attention_bias", false}});
    check_throws<UsageError>(
        [&] { parse(json); },
        {fmt::format("{}; a \"llama\" does not have hidden_act=\"gelu\", logit_scale=0.0625; "
                     "supported: ",
                     difference)});
  }
  for (const char* kind :
       {"cohere", "deepseek_v2", "gemma2", "glm4", "granite", "phi", "qwen2_moe"}) {
    REQUIRE(seen.contains(kind));
  }
  for (const char* kind : {"llama", "mistral", "mixtral", "deepseek_v3"}) {
    REQUIRE(!seen.contains(kind));
  }
}

TEST_CASE("config.json: a kind of model that nobody knows is refused by the keys that differ") {
  Json json = minimal();
  json["model_type"] = "unheard_of";
  const auto check = [&](const std::string& said) {
    check_throws<UsageError>(
        [&] { parse(json); },
        {"model_type=\"unheard_of\" is not known here; " + said + "; supported: \"llama\""});
  };
  check("its keys are those of a \"llama\", so what differs is in its code");
  json["layer_types"] = {"full_attention"};
  json["attention_bias"] = true;
  json["qk_norm"] = true;
  check(
      R"(a "llama" does not have attention_bias=true, layer_types=["full_attention"], qk_norm=true)");
  // Beside the nearest kind: an expert's width is a DeepSeek-V3's.
  json.update({{"moe_intermediate_size", 8}, {"n_routed_experts", 4}, {"scoring_func", "softmax"}});
  check(R"(a "deepseek_v3" does not have attention_bias=true, layer_types=["full_attention"], )"
        R"(qk_norm=true, scoring_func="softmax")");
  for (int i = 0; i < 9; ++i) json[fmt::format("zz{}", i)] = std::string(90, 'x');
  check(
      "a \"deepseek_v3\" does not have attention_bias=true, layer_types=[\"full_attention\"], "
      "qk_norm=true, scoring_func=\"softmax\", zz0=\"xxxxxxxxxxxxxxxxxxxxxxx..., "
      "zz1=\"xxxxxxxxxxxxxxxxxxxxxxx..., zz2=\"xxxxxxxxxxxxxxxxxxxxxxx..., "
      "zz3=\"xxxxxxxxxxxxxxxxxxxxxxx... and 5 more");
}

/// A config.json of the kind that says everything it must, with dense layers before any experts.
Json minimal_of(const std::string& model_type) {
  Json json = minimal();
  json["model_type"] = model_type;
  json.erase("architectures");
  if (model_type == "mistral") json["sliding_window"] = nullptr;
  if (model_type != "llama" && model_type != "deepseek_v3") json["num_key_value_heads"] = 4;
  if (model_type == "deepseek_v3") {
    json.update({{"num_key_value_heads", 4},
                 {"first_k_dense_replace", 1},
                 {"n_routed_experts", 8},
                 {"num_experts_per_tok", 4},
                 {"n_group", 4},
                 {"topk_group", 2}});
  }
  return json;
}

constexpr const char* kModelTypes[] = {"llama", "mistral", "mixtral", "deepseek_v3"};

TEST_CASE("config.json: each known key is used, harmless, or refused by key and value") {
  // No key means any of these to anybody, or they may say a thing that has an effect.
  const Json nonsense = Json::parse(R"([{"a": 1}])");
  for (const std::string model_type : kModelTypes) {
    const Json base = minimal_of(model_type);
    const HfConfig silent = parse(base);
    for (const HfKey& row : hf_keys()) {
      if (!row.is_of(model_type)) continue;
      CAPTURE(model_type, row.key);
      const auto with = [&](const Json& value) {
        Json json = base;
        json[row.key] = value;
        return json;
      };
      if (row.rule == HfKey::harmless) {
        for (const Json& value : {nonsense, Json(7), Json("x"), Json(true)}) {
          REQUIRE(parse(with(value)) == silent);
        }
        continue;
      }
      const std::string shown = std::string(row.key) + "=[{\"a\":1}]";
      check_throws<UsageError>([&] { parse(with(nonsense)); }, {"DIR/config.json", row.key});
      if (row.rule == HfKey::used) continue;
      check_throws<UsageError>([&] { parse(with(nonsense)); }, {shown, row.reason});
      REQUIRE(parse(with(Json::parse(row.allowed))) == silent);
    }
  }
}

TEST_CASE("config.json: a key that is not known of this kind of model is refused with its value") {
  std::set<std::string> keys = {
      "attn_logit_softcapping", "embedding_multiplier", "qk_norm", "clip_qkv", "num_experts", ""};
  for (const HfKey& row : hf_keys()) keys.insert(row.key);
  int refused_keys = 0;
  for (const std::string model_type : kModelTypes) {
    for (const std::string& key : keys) {
      const bool known = std::ranges::any_of(
          hf_keys(), [&](const HfKey& row) { return row.key == key && row.is_of(model_type); });
      if (known) continue;
      CAPTURE(model_type, key);
      Json json = minimal_of(model_type);
      json[key] = 17.5;
      check_throws<UsageError>([&] { parse(json); }, {"=17.5 is not known of a", "leave it out"});
      json[key] = nullptr;  // which says nothing
      parse(json);
      ++refused_keys;
    }
  }
  REQUIRE(refused_keys > 50);
  check_throws<UsageError>([&] { parse_with("a key\nwith more lines", 1); },
                           {R"(: "a key\nwith more lines"=1 is)"});
  refused("original_max_position_embeddings", 64, {"=64 has no effect", "leave it out"});
}

TEST_CASE("config.json: RoPE's settings are those of their type, no more and no fewer") {
  const Json all = {{"factor", 4.0},         {"original_max_position_embeddings", 64},
                    {"low_freq_factor", 1},  {"high_freq_factor", 4},
                    {"beta_fast", 20},       {"beta_slow", 2},
                    {"mscale", 0.5},         {"mscale_all_dim", 0.5},
                    {"truncate", true},      {"attention_factor", nullptr},
                    {"long_factor", {1, 2}}, {"mrope_section", {1, 2}}};
  const std::map<std::string, std::set<std::string>> needed = {
      {"default", {}},
      {"linear", {"factor"}},
      {"llama3",
       {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}},
      {"yarn", {"factor"}}};
  const std::set<std::string> of_yarn = {"original_max_position_embeddings",
                                         "beta_fast",
                                         "beta_slow",
                                         "mscale",
                                         "mscale_all_dim",
                                         "truncate",
                                         "attention_factor"};
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    for (const auto& [type, keys] : needed) {
      Json settings = {{"rope_type", type}, {"rope_theta", 100}};
      for (const std::string& key : keys) settings[key] = all[key];
      REQUIRE(parse_with(name, settings).rope_scaling.rope_type == type);
      for (const auto& [key, value] : all.items()) {
        CAPTURE(name, type, key);
        Json other = settings;
        if (keys.contains(key)) {
          other.erase(key);
          refused(name, other, {key + " is missing"});
          continue;
        }
        other[key] = value.is_null() ? Json(1.5) : value;
        if (type == "yarn" && of_yarn.contains(key) && key != "attention_factor") {
          parse_with(name, other);
        } else {
          refused(name, other, {key + "="});
        }
      }
    }
    // Without a type: silence is "default", and what only other types have is not passed over.
    REQUIRE(parse_with(name, {{"rope_theta", 100}}).rope_theta == 100);
    refused(name, {{"factor", 8}}, {"factor=8", "\"default\""});
    refused(name, {{"rope_type", nullptr}, {"factor", 8}}, {"factor=8"});
    refused(name, {{"type", "linear"}, {"rope_type", "default"}, {"factor", 8}},
            {"type=\"linear\""});
    const Json nested = {{"rope_type", "default"}, {"rope_theta", 100}};
    refused(name, {{"full_attention", nested}, {"sliding_attention", nested}},
            {"full_attention={\"rope_theta\":100"});
  }
}

TEST_CASE("config.json of a Mistral whose window does not act is that of a Llama") {
  Json json = minimal_of("mistral");
  json["architectures"] = {"MistralForCausalLM"};
  json["max_position_embeddings"] = 4096;
  json["num_key_value_heads"] = 2;
  Json llama = json;
  llama["model_type"] = "llama";
  llama["architectures"] = {"LlamaForCausalLM"};
  HfConfig expected = parse(llama);
  expected.model_type = "mistral";
  for (const Json& window : {Json(nullptr), Json(4096), Json(131072)}) {
    json["sliding_window"] = window;
    REQUIRE(parse(json) == expected);
  }
  json.erase("sliding_window");  // which means 4096
  REQUIRE(parse(json) == expected);
  json["max_position_embeddings"] = 4097;
  check_throws<UsageError>([&] { parse(json); },
                           {"sliding_window=4096 (what its absence means)",
                            "max_position_embeddings=4097", "set max_position_embeddings=4096"});
  json["sliding_window"] = 100;
  check_throws<UsageError>([&] { parse(json); }, {"sliding_window=100 is not supported"});
  json["sliding_window"] = 0;
  check_throws<UsageError>([&] { parse(json); }, {"sliding_window=0", "whole number"});
  Json silent = minimal();
  silent["model_type"] = "mistral";
  silent["num_attention_heads"] = 8;
  silent.erase("architectures");
  silent["sliding_window"] = nullptr;
  REQUIRE(parse(silent).num_kv_heads == 8);
  REQUIRE(parse(silent).max_position_embeddings == 131072);
  REQUIRE(parse(silent).rope_theta == 10000);
  REQUIRE(parse(silent).rms_norm_eps == 1e-6);
}

TEST_CASE("config.json: values that cannot be are refused") {
  for (const char* key :
       {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"}) {
    const std::vector<Json> values = {
        0, -4, 2.5, "8", true, Json::array(), Json::object(), 1e30, uint64_t{1} << 63, INT64_MIN};
    for (const Json& value : values) refused(key, value, {"whole number"});
  }
  for (const char* key : {"hidden_size", "num_hidden_layers", "num_attention_heads",
                          "intermediate_size", "vocab_size"}) {
    refused(key, nullptr, {"missing"});
  }
  refused("hidden_size", int64_t{1} << 40);
  for (const char* key : {"rms_norm_eps", "rope_theta"}) {
    for (const Json& value : {Json(-1), Json("1e-5"), Json(true), Json(Json::array())}) {
      refused(key, value, {"number"});
    }
  }
  refused("tie_word_embeddings", 1, {"true or false"});
  refused("num_attention_heads", 5, {"divide hidden_size=48"});
  refused("num_key_value_heads", 3, {"divide num_attention_heads=4"});
  refused("head_dim", 7, {"head_dim=7", "even"});
}

TEST_CASE("config.json: what is no JSON object, or says a thing twice, is refused") {
  const auto refused_text = [](const std::string& text, const std::vector<std::string>& parts) {
    CAPTURE(text);
    check_throws<std::exception>([&] { parse_hf_config(text, "DIR/config.json"); }, parts);
  };
  refused_text("", {"DIR/config.json"});
  refused_text("{\"model_type\": \"llama\"", {"DIR/config.json", "byte 22"});
  refused_text("[]", {"DIR/config.json", "no JSON object"});
  refused_text("{\"hidden_size\": 8, \"hidden_size\": 16}", {"\"hidden_size\"", "twice"});
  refused_text("{\"rms_norm_eps\": NaN}", {"DIR/config.json"});
  refused_text("{\"rms_norm_eps\": 1e999}", {"DIR/config.json"});
  refused_text(std::string(100000, '['), {"DIR/config.json", "deep"});
  refused_text(std::string(2 << 20, ' '), {"DIR/config.json", "2097152 bytes"});
}

/// Config of a kind of model that is no Llama, where it is silent on the rest.
Json silent_of(const char* model_type) {
  Json json = minimal();
  json["model_type"] = model_type;
  json.erase("architectures");
  return json;
}

TEST_CASE("config.json of a Mixtral") {
  Json json = silent_of("mixtral");
  json["num_attention_heads"] = 8;
  const HfConfig silent = parse(json);
  REQUIRE(silent.model_type == "mixtral");
  REQUIRE(silent.num_kv_heads == 8);
  REQUIRE(silent.rms_norm_eps == 1e-5);
  REQUIRE(silent.rope_theta == 1e6);
  REQUIRE(silent.max_position_embeddings == 131072);
  REQUIRE(silent.experts.num_experts == 8);
  REQUIRE(silent.experts.num_experts_per_tok == 2);
  json.update({{"architectures", {"MixtralForCausalLM"}},
               {"num_local_experts", 6},
               {"num_experts_per_tok", 3},
               {"router_jitter_noise", 0.0},
               {"router_aux_loss_coef", 0.02}});
  const HfConfig config = parse(json);
  const HfExperts& experts = config.experts;
  REQUIRE(experts.num_experts == 6);
  REQUIRE(experts.num_experts_per_tok == 3);
  REQUIRE(experts.moe_ffn_hidden_size == 60);
  REQUIRE(experts.num_shared_experts == 0);
  REQUIRE(experts.first_dense_layers == 0);
  REQUIRE(experts.router_score == "softmax");
  REQUIRE(experts.norm_topk_prob);
  REQUIRE(experts.routed_scaling_factor == 1);
  REQUIRE(!experts.choice_bias);
  REQUIRE(config.latent.kv_lora_rank == 0);
  for (const auto& [key, value] :
       std::map<std::string, Json>{{"architectures", {"LlamaForCausalLM"}},
                                   {"num_local_experts", 0},
                                   {"num_experts_per_tok", 7},
                                   {"router_jitter_noise", 0.1},
                                   {"sliding_window", 4096}}) {
    Json other = json;
    other[key] = value;
    check_throws<UsageError>([&] { parse(other); }, {"DIR/config.json", key});
  }
}

/// A DeepSeek-V3 that says all of its shape.
Json deepseek() {
  Json json = silent_of("deepseek_v3");
  json.update({{"num_key_value_heads", 4},
               {"n_routed_experts", 12},
               {"num_experts_per_tok", 3},
               {"moe_intermediate_size", 20},
               {"n_shared_experts", 2},
               {"first_k_dense_replace", 1},
               {"scoring_func", "sigmoid"},
               {"topk_method", "noaux_tc"},
               {"norm_topk_prob", false},
               {"routed_scaling_factor", 1.5},
               {"n_group", 4},
               {"topk_group", 2},
               {"q_lora_rank", 24},
               {"kv_lora_rank", 32},
               {"qk_nope_head_dim", 9},
               {"qk_rope_head_dim", 6},
               {"v_head_dim", 14},
               {"head_dim", 64},  // transformers reads over it
               {"num_nextn_predict_layers", 2},
               {"rms_norm_eps", 1e-3}});
  return json;
}

void refused_deepseek(const std::string& key, const Json& value, std::vector<std::string> parts) {
  Json json = deepseek();
  json[key] = value;
  CAPTURE(key, value.dump());
  parts.insert(parts.begin(), {"DIR/config.json", key});
  check_throws<UsageError>([&] { parse(json); }, parts);
}

TEST_CASE("config.json of a DeepSeek-V3: its experts") {
  Json json = silent_of("deepseek_v3");
  json["num_attention_heads"] = 128;
  json["num_hidden_layers"] = 4;
  const HfExperts silent = parse(json).experts;
  REQUIRE(silent.num_experts == 256);
  REQUIRE(silent.num_experts_per_tok == 8);
  REQUIRE(silent.moe_ffn_hidden_size == 2048);
  REQUIRE(silent.num_shared_experts == 1);
  REQUIRE(silent.first_dense_layers == 3);
  REQUIRE(silent.norm_topk_prob);
  REQUIRE(silent.routed_scaling_factor == 2.5);
  REQUIRE(silent.expert_nodes == 8);
  REQUIRE(silent.route_nodes == 4);
  const HfConfig config = parse(deepseek());
  const HfExperts& experts = config.experts;
  REQUIRE(experts.num_experts == 12);
  REQUIRE(experts.num_experts_per_tok == 3);
  REQUIRE(experts.moe_ffn_hidden_size == 20);
  REQUIRE(config.ffn_hidden_size == 60);
  REQUIRE(experts.num_shared_experts == 2);
  REQUIRE(experts.first_dense_layers == 1);
  REQUIRE(experts.router_score == "sigmoid");
  REQUIRE(!experts.norm_topk_prob);
  REQUIRE(experts.routed_scaling_factor == 1.5);
  REQUIRE(experts.expert_nodes == 4);
  REQUIRE(experts.route_nodes == 2);
  REQUIRE(experts.choice_bias);
  json = deepseek();
  json["n_group"] = 1;  // nothing to rank: any k
  json["topk_group"] = 1;
  REQUIRE(parse(json).experts.route_nodes == 1);
  json["first_k_dense_replace"] = 3;  // that is every layer
  REQUIRE(parse(json).experts.num_experts == 0);
  refused_deepseek("scoring_func", "softmax", {"supported: \"sigmoid\""});
  refused_deepseek("topk_method", "greedy", {"supported: \"noaux_tc\""});
  refused_deepseek("moe_layer_freq", 2, {"supported: 1"});
  refused_deepseek("n_group", 5, {"must divide n_routed_experts=12"});
  refused_deepseek("topk_group", 5, {"in [1, 4]"});
  refused_deepseek("first_k_dense_replace", 4, {"in [0, 3]"});
  refused_deepseek("n_routed_experts", 0, {"whole number"});
  for (int64_t allowed : {1, 3, 4}) {  // 3 experts of a group would count, or 1
    refused_deepseek("topk_group", allowed, {"num_experts_per_tok=3", "must be 2"});
  }
}

TEST_CASE("config.json of a DeepSeek-V3: its attention") {
  Json json = silent_of("deepseek_v3");
  json["num_attention_heads"] = 128;
  const HfLatentAttention silent = parse(json).latent;
  REQUIRE(silent.q_lora_rank == 1536);
  REQUIRE(silent.kv_lora_rank == 512);
  REQUIRE(silent.qk_nope_head_dim == 128);
  REQUIRE(silent.qk_rope_head_dim == 64);
  REQUIRE(silent.v_head_dim == 128);
  REQUIRE(silent.rope_interleave);
  REQUIRE(parse(json).head_dim == 192);
  REQUIRE(parse(json).rms_norm_eps == 1e-6);
  REQUIRE(parse(json).predicting_layers == 1);
  HfConfig config = parse(deepseek());
  const HfLatentAttention& latent = config.latent;
  REQUIRE(latent.q_lora_rank == 24);
  REQUIRE(latent.kv_lora_rank == 32);
  REQUIRE(latent.qk_nope_head_dim == 9);
  REQUIRE(latent.qk_rope_head_dim == 6);
  REQUIRE(latent.v_head_dim == 14);
  REQUIRE(latent.rms_norm_eps == 1e-6);
  REQUIRE(config.rms_norm_eps == 1e-3);
  REQUIRE(config.head_dim == 15);
  REQUIRE(config.predicting_layers == 2);
  json = deepseek();
  json["q_lora_rank"] = nullptr;  // not as if it were missing
  json["num_key_value_heads"] = nullptr;
  REQUIRE(parse(json).latent.q_lora_rank == 0);
  REQUIRE(parse(json).num_kv_heads == 4);
  for (const Json& other : {Json(false), Json(nullptr)}) {
    json["rope_interleave"] = other;
    REQUIRE(!parse(json).latent.rope_interleave);
  }
  json.erase("num_key_value_heads");
  check_throws<UsageError>([&] { parse(json); },
                           {"num_key_value_heads=128", "num_attention_heads=4", "supported: 4"});
  refused_deepseek("num_key_value_heads", 2, {"num_key_value_heads=2", "supported: 4"});
  refused_deepseek("attention_bias", true, {"projections have no biases", "supported: false"});
  refused_deepseek("qk_rope_head_dim", 7, {"qk_rope_head_dim=7 must be even"});
  refused_deepseek("v_head_dim", 16, {"v_head_dim=16 must be at most", "qk_rope_head_dim=15"});
  refused_deepseek("q_lora_rank", 0, {"whole number"});
  refused_deepseek("kv_lora_rank", 0, {"whole number"});
  refused_deepseek("rope_interleave", 1, {"true or false"});
  refused_deepseek("quantization_config", {{"quant_method", "fp8"}}, {"must be F32"});
}

TEST_CASE("config.json: YaRN's settings") {
  Json yarn = {{"type", "yarn"}, {"factor", 40}, {"original_max_position_embeddings", 4096}};
  Json json = deepseek();
  json["rope_scaling"] = yarn;
  RopeScaling scaling = parse(json).rope_scaling;
  REQUIRE(scaling.rope_type == "yarn");
  REQUIRE(scaling.rope_factor == 40);
  REQUIRE(scaling.rope_beta_fast == 32);
  REQUIRE(scaling.rope_beta_slow == 1);
  REQUIRE(scaling.rope_mscale == 0);
  REQUIRE(scaling.rope_mscale_all_dim == 0);
  REQUIRE(scaling.rope_original_max_position_embeddings == 4096);
  yarn.update({{"beta_fast", 16}, {"beta_slow", 2.5}, {"mscale", 0.7}, {"mscale_all_dim", 1.0}});
  json["rope_scaling"] = yarn;
  scaling = parse(json).rope_scaling;
  REQUIRE(scaling.rope_beta_fast == 16);
  REQUIRE(scaling.rope_beta_slow == 2.5);
  REQUIRE(scaling.rope_mscale == 0.7);
  REQUIRE(scaling.rope_mscale_all_dim == 1);
  const auto refused_yarn = [&](const char* key, const Json& value,
                                const std::vector<std::string>& parts) {
    Json settings = yarn;
    settings[key] = value;
    refused_deepseek("rope_scaling", settings, parts);
  };
  refused_yarn("truncate", false, {"truncate=false", "supported: true"});
  refused_yarn("attention_factor", 1.2, {"attention_factor=1.2", "leave it out"});
  refused_yarn("beta_fast", 2.5, {"beta_fast=2.5 must be above beta_slow=2.5"});
  refused_yarn("mscale", -1, {"mscale=-1"});
  refused_yarn("rope_theta", 1, {"rope_theta=1 must be above 1"});
  refused_yarn("type", "linear", {"beta_fast=16", "\"linear\"", "yarn"});
  refused_yarn("type", "dynamic", {"\"dynamic\"", "\"yarn\""});
}

TEST_CASE("RoPE scaling: linear stretches all waves, llama3 the long ones") {
  constexpr double kTurn = 2 * std::numbers::pi;
  RopeScaling scaling;
  const auto scaled = [&](double frequency) { return scaling.frequency(1 / frequency, 1, 2); };
  const auto ratios = [&] { return Values{scaled(1), scaled(1e-3) / 1e-3, scaled(1e-6) / 1e-6}; };
  check_close(ratios(), Values{1, 1, 1}, 1e-15);
  scaling.rope_factor = 4;
  scaling.rope_type = "linear";
  check_close(ratios(), Values{0.25, 0.25, 0.25}, 1e-15);
  scaling.rope_type = "llama3";
  scaling.rope_original_max_position_embeddings = 1000;
  scaling.rope_low_freq_factor = 1;
  scaling.rope_high_freq_factor = 5;
  const auto stretched = [&](double wavelength) {
    return kTurn / scaled(kTurn / wavelength) / wavelength;
  };
  check_close(Values{stretched(6), stretched(199)}, Values{1, 1}, 1e-14);
  check_close(Values{stretched(1001), stretched(1e6)}, Values{4, 4}, 1e-14);
  // 3 waves in 1000 positions are half-way from 1 to 5: the mean of both frequencies.
  check_close(Values{stretched(1000.0 / 3)}, Values{1 / (0.5 + 0.5 / 4)}, 1e-14);
  check_close(Values{stretched(200.001), stretched(999.999)}, Values{1, 4}, 1e-5);
}

TEST_CASE("RoPE scaling: yarn stretches by the number of the pair, and makes scores larger") {
  // Waves of 6.3, 19.9, 62.8 and 199 positions. 16, of which 4 fit, and 64 lie between them.
  const RopeScaling unscaled;
  RopeScaling scaling;
  REQUIRE(scaling.amplitude() == 1);
  REQUIRE(scaling.score_factor() == 1);
  scaling.rope_type = "yarn";
  scaling.rope_factor = 4;
  scaling.rope_beta_fast = 4;
  scaling.rope_original_max_position_embeddings = 64;
  const auto ratios = [&] {
    Values values;
    for (int64_t pair = 0; pair < 4; ++pair) {
      values.push_back(scaling.frequency(100, pair, 8) / unscaled.frequency(100, pair, 8));
    }
    return values;
  };
  check_close(ratios(), Values{1, 0.75, 0.5, 0.25}, 1e-15);
  scaling.rope_beta_fast = 1.05;  // both ends between the second pair and the third
  scaling.rope_beta_slow = 1.04;
  check_close(ratios(), Values{1, 1, 0.25, 0.25}, 1e-15);
  REQUIRE(scaling.score_factor() == 1);
  const double grown = 0.1 * std::log(4.0);
  check_close(Values{scaling.amplitude()}, Values{1 + grown}, 1e-15);
  scaling.rope_mscale = 0.5;  // alone it says nothing
  check_close(Values{scaling.amplitude()}, Values{1 + grown}, 1e-15);
  scaling.rope_mscale_all_dim = 2;
  const double all = 1 + 2 * grown;
  check_close(Values{scaling.amplitude(), scaling.score_factor()},
              Values{(1 + 0.5 * grown) / all, all * all}, 1e-15);
  scaling.rope_factor = 1;
  check_close(Values{scaling.amplitude(), scaling.score_factor()}, Values{1, 1}, 1e-15);
}

}  // namespace
}  // namespace usp::test
