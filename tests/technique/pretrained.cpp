#include "train/pretrained.h"

#include <nlohmann/json.hpp>

#include "files/safetensors.h"
#include "tiny_llama.h"

/// Models of Hugging Face's: tests/data/llama holds tiny ones with the logits that transformers
/// computes (tests/fixtures/make_llama.py).
namespace usp::test {
namespace {

using Json = nlohmann::json;

std::string llama(const std::string& name) { return USP_TEST_DATA "/llama/" + name; }

constexpr const char* kModels[] = {"gqa",  "linear",   "llama3", "llama3_old_spelling",
                                   "tied", "head_dim", "eps",    "bf16",
                                   "f16",  "sharded"};

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

/// Of the model for the tokens of `name`'s fixture.
Values logits_of(Model& model, const std::string& name) {
  const Values tokens = stored(TensorCollection(llama(name) + "/expected.safetensors"), "tokens");
  const std::vector<int32_t> ids(tokens.begin(), tokens.end());
  Pass pass;
  pass.num_samples = 1;
  pass.positions = Positions(0, std::ssize(ids));
  pass.tokens = Tensor::from_host(ids, {std::ssize(ids)});
  return model.logits(pass).items();
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
  explicit Copy(const std::string& name) {
    for (const auto& entry : std::filesystem::directory_iterator(llama(name))) {
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
        "rope_original_max_position_embeddings", "max_position_embeddings"}) {
    refused({fmt::format("--{}", flag), "8"}, {flag, llama("gqa"), "config.json decides"});
  }
  refused({"--rope_type", "linear"}, {"rope_type", "config.json decides"});
  refused({"--rms_norm_eps", "0.1"}, {"rms_norm_eps", "config.json decides"});
  refused({"--tie_word_embeddings"}, {"tie_word_embeddings", "config.json decides"});
  refused({"--seq_len", "129"},
          {"seq_len=129", "max_position_embeddings=128", "gqa/config.json", "try seq_len=128"});
  REQUIRE(import_config(llama("gqa"), {"--seq_len", "128"}).seq_len == 128);
  refused({"--data", "text.txt"}, {"text.txt", "no bytes", "./book tokenize", llama("gqa")});
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

}  // namespace
}  // namespace usp::test
