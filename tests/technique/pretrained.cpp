#include "train/pretrained.h"

#include <nlohmann/json.hpp>

#include "files/safetensors.h"
#include "technique/tiny_llama.h"

/// Models of Hugging Face's: tests/data/llama, mixtral and deepseek_v3 hold tiny ones with what
/// transformers computes (tests/fixtures/make_llama.py, make_mixtral.py, make_deepseek.py).
namespace usp::test {
namespace {

using Json = nlohmann::json;

std::string llama(const std::string& name) { return USP_TEST_DATA "/llama/" + name; }
std::string mixtral(const std::string& name) { return USP_TEST_DATA "/mixtral/" + name; }
std::string deepseek(const std::string& name) { return USP_TEST_DATA "/deepseek_v3/" + name; }

constexpr const char* kModels[] = {"gqa",  "linear",   "llama3", "llama3_old_spelling",
                                   "tied", "head_dim", "eps",    "bf16",
                                   "f16",  "sharded",  "yarn",   "yarn_mscale"};

/// What the command line `--model DIR ...` resolves to.
TrainConfig import_config(const std::string& directory, std::vector<std::string> flags = {}) {
  flags.insert(flags.begin(), {"program", "--model", directory});
  std::vector<const char*> words;
  for (const std::string& flag : flags) words.push_back(flag.c_str());
  TrainConfig config;
  config.seq_len = 32;
  config.data = "tokens.bin";
  config.dtype = "f64";
  Args args("A test.");
  config.bind(args);
  REQUIRE(args.parse(static_cast<int>(words.size()), words.data()));
  config.validate(args);
  return config;
}

Model import_model(const std::string& directory, DType dtype = DType::f64, bool naive = false) {
  const TrainConfig config = import_config(directory);
  return allocated_model(config.model, config.seq_len, dtype, probabilities_of(naive), /*seed=*/1);
}

Values stored(const TensorCollection& tensors, const std::string& name) {
  const StoredTensor& tensor = tensors.get(name);
  Values values(tensor.numel());
  tensor.read(0, values);
  return values;
}

/// One sample: what a fixture's file calls `tokens` and, if it has them, `targets`.
Pass sample_of(const TensorCollection& expected) {
  const auto ids = [&](const char* name) {
    const Values values = stored(expected, name);
    return Tensor::from_host(std::vector<int32_t>(values.begin(), values.end()),
                             {std::ssize(values)});
  };
  Pass pass;
  pass.num_samples = 1;
  pass.tokens = ids("tokens");
  pass.positions = Positions(0, pass.tokens.numel());
  if (expected.find("targets") != nullptr) pass.targets = ids("targets");
  return pass;
}

/// Logits of the model for the tokens of `name`'s fixture.
Values logits_of(Model& model, const std::string& name) {
  return model.logits(sample_of(TensorCollection(llama(name) + "/expected.safetensors"))).items();
}

TEST_CASE("imported models give the logits of transformers") {
  const OnDevice cpu;
  for (const char* name : kModels) {
    CAPTURE(name);
    const TensorCollection file(llama(name) + "/expected.safetensors");
    const Values exact = stored(file, "logits_f64"), usual = stored(file, "logits");
    for (bool naive : {false, true}) {
      Model f64 = import_model(llama(name), DType::f64, naive);
      const Values logits = logits_of(f64, name);
      // 3e-15 apart, and 1.5e-6 where transformers has float32 inside.
      check_close(logits, exact, 1e-13, "f64");
      check_close(logits, usual, 5e-6, "f64 against float32 inside");
    }
    // 3e-6 and 0.08: logits of weights this large amplify rounding.
    Model f32 = import_model(llama(name), DType::f32),
          bf16 = import_model(llama(name), DType::bf16);
    check_close(logits_of(f32, name), exact, 2e-5, "f32");
    check_close(logits_of(bf16, name), exact, 0.2, "bf16");
  }
}

TEST_CASE("the value of every imported weight is the file's, and the master keeps all its digits") {
  const OnDevice cpu;
  const TensorCollection file(llama("sharded"));
  for (DType dtype : kFloatDTypes) {
    Model model = import_model(llama("sharded"), dtype);
    for (size_t i = 0; i < model.parameters().size(); ++i) {
      const Parameter& parameter = model.parameters()[i];
      const Values values = stored(file, parameter.name);
      const Shape shape{parameter.shard.numel()};
      REQUIRE(same_bits(parameter.shard.value, Tensor::from_host(values, shape, dtype)));
      REQUIRE(same_bits(parameter.shard.master,
                        Tensor::from_host(values, shape, accumulate_dtype(dtype))));
    }
  }
}

TEST_CASE("a rank imports its slices") {
  const OnDevice cpu;
  const TensorCollection file(llama("gqa"));
  const std::string name = "model.layers.1.mlp.up_proj.weight";  // [40, 32]
  const std::vector<std::vector<Slice>> layouts = {
      {{0, 7, 11}}, {{1, 5, 13}}, {{0, 0, 40}}, {{0, 3, 30}, {1, 31, 1}}, {{0, 39, 1}, {1, 2, 29}},
      {{0, 5, 0}}};
  for (const std::vector<Slice>& slices : layouts) {
    ParameterList parameters;
    const Parameter& parameter = parameters.add(name, {40, 32}, 0.02, slices);
    parameters.allocate(DType::f64, 1);
    load_pretrained(parameters, llama("gqa"));
    Tensor expected = Tensor::from_host(stored(file, name), {40, 32}, DType::f64);
    for (const Slice& slice : slices) {
      expected = expected.narrow(slice.axis, slice.offset, slice.length);
    }
    REQUIRE(same_bits(parameter.value, expected));
  }
}

TEST_CASE("a directory's model trains on meta by its shapes alone") {
  const OnDevice meta(Device::meta);
  SoloTrainer trainer(import_config(llama("head_dim")), nullptr);
  trainer.train_step(0);
  REQUIRE(
      trainer.model().parameters().find("model.layers.0.self_attn.o_proj.weight").global_shape ==
      Shape{32, 48});
}

/// A copy of a fixture that may be altered.
class Copy {
 public:
  explicit Copy(const std::string& name, std::string (*fixture)(const std::string&) = llama) {
    for (const auto& entry : std::filesystem::directory_iterator(fixture(name))) {
      std::filesystem::copy(entry.path(), path());
    }
  }
  std::string path() const { return dir_.file(""); }
  std::string file(const std::string& name) const { return dir_.file(name); }

  void set(const std::string& key, const Json& value) const {
    Json config = Json::parse(read_file(file("config.json")));
    config[key] = value;
    dir_.write("config.json", config.dump());
  }

  /// Writes the weights anew, in f64, after `change` has seen them by name.
  using Weights = std::map<std::string, std::pair<Shape, Values>>;
  void alter(const std::function<void(Weights&)>& change) const {
    Weights weights;
    {
      const TensorCollection before(file("model.safetensors"));
      for (const auto& [name, tensor] : before.tensors()) {
        Shape shape = tensor->shape.size() == 2 ? Shape{tensor->shape[0], tensor->shape[1]}
                                                : Shape{tensor->shape[0]};
        weights[name] = {shape, stored(before, name)};
      }
    }
    change(weights);
    std::vector<TensorToStore> tensors;
    for (const auto& [name, weight] : weights) {
      tensors.push_back(to_store(name, Tensor::from_host(weight.second, weight.first, DType::f64)));
    }
    write_safetensors(file("model.safetensors"), std::move(tensors));
  }

 private:
  TempDir dir_;
};

TEST_CASE("weights that do not fit config.json are refused by name") {
  const OnDevice cpu;
  const auto refused = [](const std::function<void(Copy::Weights&)>& change,
                          const std::vector<std::string>& parts, const char* fixture = "gqa") {
    const Copy copy(fixture);
    copy.alter(change);
    check_throws<std::exception>([&] { import_config(copy.path()); }, parts);
  };
  refused([](auto& w) { w.erase("model.layers.1.mlp.up_proj.weight"); },
          {"model.safetensors", "1 of the 21 weights", "missing",
           "\"model.layers.1.mlp.up_proj.weight\""});
  refused([](auto& w) { w.erase("lm_head.weight"); }, {"missing", "\"lm_head.weight\""});
  refused(
      [](auto& w) {
        w["model.layers.0.self_attn.q_proj.bias"] = {{4}, Values(4)};
      },
      {"1 tensors", "\"model.layers.0.self_attn.q_proj.bias\""});
  refused(
      [](auto& w) {
        w["model.layers.2.mlp.up_proj.weight"] = {{4}, Values(4)};
      },
      {"no place", "\"model.layers.2.mlp.up_proj.weight\""});
  refused(
      [](auto& w) {
        w["model.norm.weight"] = {{33}, Values(33)};
      },
      {"\"model.norm.weight\"", "[33]", "[32]"});
  refused(
      [](auto& w) {
        w["model.embed_tokens.weight"].first = {32, 64};
      },
      {"\"model.embed_tokens.weight\"", "[32, 64]", "[64, 32]"});
  refused(
      [](auto& w) {
        w["lm_head.weight"] = w["model.embed_tokens.weight"];
        w["lm_head.weight"].second[70] = 5;
      },
      {"lm_head.weight differs from model.embed_tokens.weight at [2, 6] (5 and ",
       "tie_word_embeddings"},
      "tied");
}

TEST_CASE("older files' inv_freq and a tied head that is stored too are read over") {
  const OnDevice cpu;
  const Copy copy("tied");
  copy.alter([](Copy::Weights& w) {
    w["lm_head.weight"] = w["model.embed_tokens.weight"];
    w["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{4}, Values(4)};
  });
  Model model = import_model(copy.path()), original = import_model(llama("tied"));
  REQUIRE(logits_of(model, "tied") == logits_of(original, "tied"));
}

TEST_CASE("a weight that is not finite in the run's dtype is refused by element") {
  const OnDevice cpu;
  const std::string name = "model.layers.0.mlp.down_proj.weight";  // [32, 40]
  const auto import_with = [&](double value, DType dtype) {
    const Copy copy("gqa");
    copy.alter([&](Copy::Weights& w) { w[name].second[3 * 40 + 7] = value; });
    import_model(copy.path(), dtype);
  };
  for (double value : {kNaN, kInf, -kInf}) {
    for (DType dtype : kFloatDTypes) {
      check_throws<Error>([&] { import_with(value, dtype); },
                          {"model.safetensors", name, "element 127", "[3, 7]",
                           fmt::format("{}", value), std::string(usp::name(dtype))});
    }
  }
  check_throws<Error>([&] { import_with(1e39, DType::f32); }, {name, "1e+39", "f32"});
  check_throws<Error>([&] { import_with(-3.3999e38, DType::bf16); }, {name, "bf16"});
  import_with(1e39, DType::f64);
  import_with(3.3999e38, DType::f32);
  import_with(-3.38e38, DType::bf16);
}

TEST_CASE("a directory's shape cannot be overridden, and its longest sequence holds") {
  const auto refused = [](const std::vector<std::string>& flags,
                          const std::vector<std::string>& parts) {
    check_throws<UsageError>([&] { import_config(llama("gqa"), flags); }, parts);
  };
  for (const char* flag :
       {"hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size",
        "vocab_size", "rope_theta", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor",
        "rope_beta_fast", "rope_beta_slow", "rope_mscale", "rope_mscale_all_dim",
        "rope_original_max_position_embeddings", "max_position_embeddings"}) {
    refused({fmt::format("--{}", flag), "8"}, {flag, llama("gqa"), "config.json decides"});
  }
  refused({"--rope_type", "linear"}, {"rope_type", "config.json decides"});
  refused({"--rms_norm_eps", "0.1"}, {"rms_norm_eps", "config.json decides"});
  refused({"--tie_word_embeddings"}, {"tie_word_embeddings", "config.json decides"});
  refused({"--seq_len", "129"},
          {"seq_len=129", "max_position_embeddings=128", "gqa/config.json", "try 128"});
  REQUIRE(import_config(llama("gqa"), {"--seq_len", "128"}).seq_len == 128);
  check_throws<UsageError>(
      [] {
        import_config(llama("gqa"), {"--data", "text.txt"}).validate_text();
      },
      {"text.txt", "no bytes", "./book tokenize", llama("gqa")});
  refused({"--prompt_ids", "1 64"}, {"prompt_ids", "64", "vocab_size=64"});
  check_throws<UsageError>([] { import_config("2B"); },
                           {"model=2B", "tiny, small, 1B", "config.json", "model.safetensors"});
  const TempDir empty;
  check_throws<UsageError>([&] { import_config(empty.file("")); },
                           {empty.file(""), "no config.json"});
}

TEST_CASE("a directory without weights is refused") {
  const Copy copy("gqa");
  std::filesystem::remove(copy.file("model.safetensors"));
  check_throws<std::exception>([&] { import_config(copy.path()); },
                               {copy.path(), "model.safetensors"});
}

#if __has_include("expert_parallel/moe.h")

constexpr const char* kMixtrals[] = {"experts", "old_spelling", "sharded"};

/// Rows of a directory's weight as ours lie: of each `period` the last `rotated` are in pairs
/// there, of which we have the first ones first.
Values pairs_apart(const Values& stored, int64_t width, int64_t period, int64_t rotated) {
  Values values = stored;
  for (int64_t begin = 0; begin < std::ssize(stored) / width; begin += period) {
    const int64_t first = begin + period - rotated;
    for (int64_t pair = 0; pair < rotated / 2; ++pair) {
      for (int64_t side : {0, 1}) {
        std::copy_n(stored.begin() + (first + 2 * pair + side) * width, width,
                    values.begin() + (first + side * rotated / 2 + pair) * width);
      }
    }
  }
  return values;
}

/// What a fixture's file has for a parameter, in our order of rows.
Values expected_gradient(const TensorCollection& expected, const HfConfig& config,
                         const Parameter& parameter) {
  const Values values = stored(expected, "grad/" + stored_name(config.model_type, parameter.name));
  const HfLatentAttention& latent = config.latent;
  const int64_t rope = latent.qk_rope_head_dim;
  if (!latent.rope_interleave) return values;
  for (const char* name : {"q_proj", "q_b_proj", "kv_a_proj_with_mqa"}) {
    if (parameter.name.find(fmt::format(".{}.", name)) == std::string::npos) continue;
    const bool keys = std::string_view(name) == "kv_a_proj_with_mqa";
    const int64_t before = keys ? latent.kv_lora_rank : latent.qk_nope_head_dim;
    return pairs_apart(values, parameter.global_shape[1], before + rope, rope);
  }
  return values;
}

/// Compares logits and gradients of a directory's model with the fixture's.
void check_model(const std::string& directory, const std::vector<std::string>& flags) {
  const HfConfig file = read_hf_config(directory);
  const TensorCollection expected(directory + "/expected.safetensors");
  SoloTrainer trainer(import_config(directory, flags), nullptr);
  Model& model = trainer.model();
  Pass pass = sample_of(expected);
  check_close(model.logits(pass).items(), stored(expected, "logits_f64"), 1e-13, "logits");
  pass.loss = Tensor::zeros({1}, DType::f64);
  pass.loss_scale = 1 / double(pass.tokens.numel());
  Grads grads(model.parameters());
  grads.begin_window(1);
  model.backward(model.forward(pass), grads, pass);
  grads.end_window();
  REQUIRE(expected.tensors().size() == model.parameters().size() + 3);
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const Parameter& parameter = model.parameters()[i];
    check_close(parameter.grad.items(), expected_gradient(expected, file, parameter), 1e-12,
                parameter.name);
  }
}

TEST_CASE("imported experts give the logits and the gradients of transformers") {
  const OnDevice cpu;
  for (const char* name : kMixtrals) {
    CAPTURE(name);
    check_model(mixtral(name), {});
  }
}

#if __has_include("latent_attention/mla.h")

/// Flags of a model whose routers choose with biases.
const std::vector<std::string> kWithBiases = {"--balance", "bias"};

constexpr const char* kDeepseeks[] = {"latent_queries", "direct_queries", "groups",
                                      "halves",         "yarn",           "dense"};

TEST_CASE("an imported DeepSeek-V3 gives the logits and the gradients of transformers") {
  const OnDevice cpu;
  for (const std::string name : kDeepseeks) {
    for (const char* attention : {"naive", "blockwise"}) {
      CAPTURE(name, attention);
      std::vector<std::string> flags = {"--attention", attention};
      if (name != "dense") flags.insert(flags.end(), kWithBiases.begin(), kWithBiases.end());
      check_model(deepseek(name), flags);
    }
  }
}

TEST_CASE("cached latents of an imported DeepSeek-V3 give the logits of transformers") {
  const OnDevice cpu;
  for (const std::string name : kDeepseeks) {
    CAPTURE(name);
    const TensorCollection expected(deepseek(name) + "/expected.safetensors");
    SoloTrainer trainer(
        import_config(deepseek(name), name == "dense" ? std::vector<std::string>{} : kWithBiases),
        nullptr);
    const Pass whole = sample_of(expected);
    const int64_t length = whole.tokens.numel(), prompt = length / 2;
    KvCache cache(length);
    Values logits;
    for (int64_t begin = 0; begin < length;) {
      Pass pass;
      pass.mode = Pass::Mode::decode;
      pass.num_samples = 1;
      pass.positions = Positions(begin, begin == 0 ? prompt : 1);
      pass.tokens = whole.tokens.narrow(0, begin, pass.positions.count());
      pass.kv_cache = &cache;
      const Values items = trainer.model().logits(pass).items();
      logits.insert(logits.end(), items.begin(), items.end());
      begin += pass.positions.count();
    }
    // Of the prompt the last position's alone.
    const Values all = stored(expected, "logits_f64");
    const int64_t vocab_size = std::ssize(all) / length;
    check_close(logits, Values(all.begin() + (prompt - 1) * vocab_size, all.end()), 1e-12, name);
  }
}

TEST_CASE("a rank imports its slices of rows that lie elsewhere in the file") {
  const OnDevice cpu;
  const TensorCollection file(deepseek("latent_queries"));
  const std::vector<std::vector<Slice>> layouts = {
      {}, {{0, 11, 11}}, {{0, 7, 21}}, {{1, 3, 5}}, {{0, 5, 30}, {1, 1, 1}}, {{0, 9, 0}}};
  // 4 heads of 5 + 6 rows; 8 of the latent and 6.
  for (const auto& [name, rows, columns, period] :
       {std::tuple{"q_b_proj", 44, 12, 11}, {"kv_a_proj_with_mqa", 14, 16, 14}}) {
    const std::string whole = fmt::format("model.layers.1.self_attn.{}.weight", name);
    const Tensor ours = Tensor::from_host(pairs_apart(stored(file, whole), columns, period, 6),
                                          {rows, columns}, DType::f64);
    for (std::vector<Slice> slices : layouts) {
      CAPTURE(name, slices.size());
      for (Slice& slice : slices)
        slice.length = std::min<int64_t>(slice.length, rows - slice.offset);
      ParameterList parameters;
      const Parameter& parameter = parameters.add(whole, {rows, columns}, 0.02, slices);
      parameters.allocate(DType::f64, 1);
      load_pretrained(parameters, deepseek("latent_queries"));
      Tensor expected = ours;
      for (const Slice& slice : slices) {
        expected = expected.narrow(slice.axis, slice.offset, slice.length);
      }
      REQUIRE(same_bits(parameter.value, expected));
    }
  }
}

TEST_CASE("a DeepSeek-V3 whose weights do not fit its config.json is refused by name") {
  const auto refused = [](const std::function<void(const Copy&)>& change,
                          const std::vector<std::string>& parts,
                          const std::vector<std::string>& flags = kWithBiases) {
    const Copy copy("latent_queries", deepseek);
    change(copy);
    check_throws<UsageError>([&] { import_config(copy.path(), flags); }, parts);
  };
  refused([](const Copy& copy) { copy.set("q_lora_rank", nullptr); },
          {"2 of the", "missing", "\"model.layers.0.self_attn.q_proj.weight\""});
  refused([](const Copy& copy) { copy.set("kv_lora_rank", 9); },
          {"self_attn.kv_a_layernorm.weight", "[8]", "[9]"});
  refused([](const Copy& copy) { copy.set("v_head_dim", 6); },
          {"self_attn.kv_b_proj.weight", "[48, 8]", "[44, 8]"});
  refused([](const Copy& copy) { copy.set("n_shared_experts", 2); },
          {"mlp.shared_experts.down_proj.weight", "[16, 8]", "[16, 16]"});
  refused([](const Copy&) {}, {"balance=none", "try bias", "bias_update_rate=0"}, {});
  for (const char* flag : {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                           "v_head_dim", "latent_rms_norm_eps"}) {
    refused([](const Copy&) {}, {flag, "config.json decides"}, {fmt::format("--{}", flag), "1"});
  }
  refused([](const Copy&) {}, {"attention_kind", "config.json decides"},
          {"--attention_kind", "mla"});
}

TEST_CASE("layers that predict more tokens, and tensors without elements, are passed over") {
  const OnDevice cpu;
  const Copy copy("latent_queries", deepseek);
  copy.alter([](Copy::Weights& w) {
    w["model.layers.2.eh_proj.weight"] = {{2, 3}, Values(6)};
    w["model.layers.1.mlp.rowless.weight"] = {{0, 16}, {}};
  });
  check_throws<UsageError>([&] { import_config(copy.path(), kWithBiases); },
                           {"1 tensors have no place", "\"model.layers.2.eh_proj.weight\""});
  copy.set("num_nextn_predict_layers", 1);
  REQUIRE(import_config(copy.path(), kWithBiases).model.mla.kv_lora_rank == 8);
}

#endif

TEST_CASE("experts in another number or of another width than config.json says are refused") {
  const auto refused = [](const std::function<void(const Copy&)>& change,
                          const std::vector<std::string>& parts) {
    const Copy copy("experts", mixtral);
    change(copy);
    check_throws<UsageError>([&] { import_config(copy.path()); }, parts);
  };
  refused([](const Copy& copy) { copy.set("num_local_experts", 3); },
          {"tensors have no place", "block_sparse_moe.experts.3.w1.weight"});
  refused([](const Copy& copy) { copy.set("num_local_experts", 5); },
          {"6 of the", "missing", "block_sparse_moe.experts.4.w1.weight"});
  refused([](const Copy& copy) { copy.set("intermediate_size", 13); },
          {"block_sparse_moe.experts.0.w", "[12, 16]", "[13, 16]"});
  refused([](const Copy& copy) { copy.set("num_experts_per_tok", 5); },
          {"num_experts_per_tok=5", "in [1, 4]"});
  for (const char* flag : {"num_experts", "num_experts_per_tok", "moe_ffn_hidden_size",
                           "num_shared_experts", "first_dense_layers", "expert_nodes"}) {
    check_throws<UsageError>(
        [&] {
          import_config(mixtral("experts"), {fmt::format("--{}", flag), "2"});
        },
        {flag, "config.json decides"});
  }
}

TEST_CASE("biases of the choice come with the weights, for a run that has them") {
  const OnDevice cpu;
  const std::string name = "model.layers.1.mlp.gate.e_score_correction_bias";
  ParameterList none;
  Parameter bias, load;
  for (Parameter* buffer : {&bias, &load}) {
    buffer->name = buffer == &bias ? name : "model.layers.1.mlp.gate.load";
    buffer->global_shape = {4};
    buffer->value = Tensor::zeros({4}, DType::f64);
    buffer->shard = {0, 4, buffer->value, buffer->value, {}};
  }
  load_pretrained(none, deepseek("latent_queries"), {&bias, &load});
  const Values biases = stored(TensorCollection(deepseek("latent_queries")), name);
  REQUIRE(bias.value.items() == biases);
  REQUIRE(load.value.items() == Values(4));
  TrainConfig config = import_config(mixtral("experts"));
  config.model.experts.choice_bias = true;
  check_throws<UsageError>([&] { config.expert_parallel.check(config); },
                           {"balance=none", "try bias", "bias_update_rate=0"});
}

#else

TEST_CASE("a program without experts says what it takes to compute them") {
  check_throws<UsageError>([] { import_config(mixtral("experts")); },
                           {mixtral("experts"), "mixtures of 4 experts", "flag num_experts"});
  check_throws<UsageError>([] { import_config(deepseek("groups")); },
                           {deepseek("groups"), "mixtures of 8 experts", "flag num_experts"});
  check_throws<UsageError>([] { import_config(deepseek("dense")); },
                           {deepseek("dense"), "latents of 8 numbers", "flag attention_kind"});
}

#endif

}  // namespace
}  // namespace usp::test
