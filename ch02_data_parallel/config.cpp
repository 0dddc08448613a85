#include "config.h"

#include <cmath>
#include <filesystem>

#include "data.h"
#include "pretrained.h"

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
    "rope_original_max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
};

std::string preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.push_back(preset.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

void check_positive(const char* flag, int64_t value) {
  check_range(flag, double(value), 1, HUGE_VAL);
}

}  // namespace

void ModelConfig::bind(Args& args) {
  args.group("Model");
  args.bind("model", model,
            "preset whose shape the flags below override (tiny, small, 1B, 8B, 70B, 405B), or a "
            "directory with config.json and safetensors");
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
  if (!std::filesystem::is_directory(model, error)) {
    usage_error(
        "model={} is no preset ({}) and no directory with config.json and model.safetensors, or "
        "model.safetensors.index.json and the files it names",
        model, preset_names());
  }
  read_directory(args);
}

void ModelConfig::read_directory(const Args& args) {
  for (const char* flag : kShapeFlags) {
    if (!args.given(flag)) continue;
    usage_error("{} cannot be given with model={}: its config.json decides; leave the flag out",
                flag, model);
  }
  const HfConfig file = read_hf_config(model);
  check_pretrained(model, file);
  pretrained = true;
  byte_tokens = file.byte_tokens || file.vocab_size == 256;
  hidden_size = file.hidden_size;
  num_layers = file.num_layers;
  num_heads = file.num_heads;
  num_kv_heads = file.num_kv_heads;
  given_head_dim = file.head_dim;
  ffn_hidden_size = file.ffn_hidden_size;
  vocab_size = file.vocab_size;
  rope_theta = file.rope_theta;
  rope_scaling = file.rope_scaling;
  rms_norm_eps = file.rms_norm_eps;
  tie_word_embeddings = file.tie_word_embeddings;
  max_position_embeddings = file.max_position_embeddings;
  model = std::filesystem::canonical(model);  // as the run's record has to say it
}

void ModelConfig::validate(const Args& args) {
  fill_from_preset(args);
  check_positive("hidden_size", hidden_size);
  check_positive("num_layers", num_layers);
  check_positive("num_heads", num_heads);
  check_positive("num_kv_heads", num_kv_heads);
  check_positive("ffn_hidden_size", ffn_hidden_size);
  check_range("vocab_size", double(vocab_size), 2, double(INT32_MAX));
  check_range("head_dim", double(given_head_dim), 0, HUGE_VAL);
  if (given_head_dim == 0 && hidden_size % num_heads != 0) {
    usage_error("num_heads={} must divide hidden_size={}, or head_dim be given; try {}", num_heads,
                hidden_size, list_divisors(hidden_size, 2 * num_heads));
  }
  if (num_heads % num_kv_heads != 0) {
    usage_error("num_kv_heads={} must divide num_heads={}; try {}", num_kv_heads, num_heads,
                list_divisors(num_heads));
  }
  if (head_dim() % 2 != 0) {
    usage_error("head_dim={} must be even: RoPE turns pairs of channels; try head_dim={}",
                head_dim(), head_dim() + 1);
  }
  check_range("rope_theta", rope_theta, 1, HUGE_VAL);
  rope_scaling.validate();
  check_range("max_position_embeddings", double(max_position_embeddings), 0, HUGE_VAL);
  check_range("rms_norm_eps", rms_norm_eps, 0, 1);
}

void OptimizerConfig::bind(Args& args) {
  args.group("Optimizer");
  args.bind("lr", lr, "peak learning rate");
  args.bind("min_lr_ratio", min_lr_ratio, "last learning rate as a fraction of lr");
  args.bind("warmup_steps", warmup_steps, "steps of linear warm-up");
  args.bind("adam_beta1", adam_beta1, "decay of the first moment");
  args.bind("adam_beta2", adam_beta2, "decay of the second moment");
  args.bind("adam_eps", adam_eps, "added to the square root");
  args.bind("weight_decay", weight_decay, "of parameters with two or more axes");
  args.bind("grad_clip", grad_clip, "largest gradient norm; 0: no clipping");
}

void OptimizerConfig::validate(const Args&) const {
  check_range("lr", lr, 0, HUGE_VAL);
  check_range("min_lr_ratio", min_lr_ratio, 0, 1);
  check_range("warmup_steps", double(warmup_steps), 0, HUGE_VAL);
  check_range("adam_beta1", adam_beta1, 0, std::nextafter(1.0, 0.0));
  check_range("adam_beta2", adam_beta2, 0, std::nextafter(1.0, 0.0));
  check_range("adam_eps", adam_eps, 0, HUGE_VAL);
  check_range("weight_decay", weight_decay, 0, HUGE_VAL);
  check_range("grad_clip", grad_clip, 0, HUGE_VAL);
}

void SampleConfig::bind(Args& args) {
  args.group("Sampling");
  args.bind("sample_tokens", sample_tokens, "tokens to sample from the trained model; 0: none");
  args.bind("temperature", temperature, "0: always the likeliest token");
  args.bind("top_k", top_k, "sample among this many likeliest tokens; 0: all");
  args.bind("prompt", prompt, "text that the sample continues (byte vocabularies)");
  args.bind("no_kv_cache", no_kv_cache, "run the whole text again for every token");
  args.bind("prompt_ids", prompt_ids,
            "token ids instead, such as '1 15043'; the sample is ids too");
}

void SampleConfig::validate(const Args&) const {
  check_range("sample_tokens", double(sample_tokens), 0, HUGE_VAL);
  check_range("temperature", temperature, 0, HUGE_VAL);
  check_range("top_k", double(top_k), 0, HUGE_VAL);
  if (prompt.empty()) usage_error("prompt is empty; give at least one character, such as 'The '");
}

void TrainConfig::bind(Args& args) {
  each_part([&](auto& part) { part.bind(args); });
  args.group("Training");
  args.bind("steps", steps, "optimizer steps");
  args.bind("seq_len", seq_len, "tokens per sample");
  args.bind("micro_batch_size", micro_batch_size, "samples per forward pass");
  args.bind("grad_acc_steps", grad_acc_steps, "micro-batches per optimizer step");
  args.bind("seed", seed, "of weights, data order and sampling");
  args.bind("dtype", dtype, {"f32", "bf16", "f64"}, "of weights and activations");
  args.group("Data");
  args.bind("data", data, "text file, or .bin of tokens; default: this project's own text");
  args.bind("token_dtype", token_dtype, {"uint16", "uint32"}, "of a .bin file");
  args.bind("data_order", data_order, {"sequential", "shuffled"}, "order of the samples");
  args.bind("val_fraction", val_fraction, "tail of the data held out for validation");
  args.bind("eval_interval", eval_interval, "steps between validations; 0: none");
  args.bind("eval_samples", eval_samples, "validation samples each time");
  args.group("Execution");
  args.bind("device", device, {"auto", "cpu"}, "where tensors live");
  args.bind("attention", attention, {"naive", "blockwise"},
            "store the attention probabilities, or recompute them in backward");
  args.bind("recompute", recompute, {"none", "selective", "full"},
            "drop the attention probabilities, or all of a block but its input, until backward");
  args.bind("grad_accumulation", grad_accumulation, {"bf16", "f32", "both"},
            "in what dtype bf16 runs keep and sum gradients; both: one for each");
  args.group("Output");
  args.bind("run_dir", run_dir, "directory for the run's files");
  args.bind("overwrite", overwrite, "replace the run that run_dir holds");
  args.bind("trace_steps", trace_steps, "steps to record in trace.json; 0: none");
  args.bind("estimate", estimate, "say what a step would need, without data, and stop");
  args.bind("estimate_file", estimate_file, "JSON file for what --estimate finds");
}

void TrainConfig::validate(const Args& args) {
  each_part([&](auto& part) { part.validate(args); });
  check_positive("steps", steps);
  check_positive("seq_len", seq_len);
  if (model.max_position_embeddings > 0 && seq_len > model.max_position_embeddings) {
    usage_error("seq_len={} is above max_position_embeddings={}{}; try seq_len={}", seq_len,
                model.max_position_embeddings,
                model.pretrained ? " of " + model.model + "/config.json" : "",
                model.max_position_embeddings);
  }
  if (!model.byte_tokens && !data.ends_with(".bin")) {
    usage_error(
        "data={} is text, but the tokens of model={} are no bytes; write a .bin of them with "
        "./book tokenize {} FILE --output FILE.bin, and give that as data",
        data.empty() ? "the project's own" : data, model.model, model.model);
  }
  if (!sample.prompt_ids.empty()) {
    parse_token_ids("prompt_ids", sample.prompt_ids, model.vocab_size);
  }
  check_positive("micro_batch_size", micro_batch_size);
  check_positive("grad_acc_steps", grad_acc_steps);
  if (grad_accumulation != "f32" && dtype != "bf16") {
    usage_error("grad_accumulation={} needs dtype=bf16, not {}; leave it out", grad_accumulation,
                dtype);
  }
  check_range("seed", double(seed), 0, HUGE_VAL);
  check_range("eval_interval", double(eval_interval), 0, HUGE_VAL);
  check_range("eval_samples", double(eval_samples), 0, HUGE_VAL);
  check_range("trace_steps", double(trace_steps), 0, HUGE_VAL);
  if (!(val_fraction >= 0 && val_fraction < 1)) {
    usage_error("val_fraction={} must lie in [0, 1); try 0.1", val_fraction);
  }
  if (!estimate && !estimate_file.empty()) {
    usage_error("estimate_file={} is written by --estimate; add that flag", estimate_file);
  }
  if (run_dir.empty()) usage_error("run_dir is empty; try runs/" USP_CHAPTER);
}

}  // namespace usp
