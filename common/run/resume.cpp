#include "run/resume.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

namespace usp {

namespace {

/// Where this run writes and what it is asked for, which nothing can say but its own command line.
constexpr std::string_view kOwn[] = {"run_dir",  "overwrite",     "resume",
                                     "estimate", "estimate_file", "world_size"};
/// Groups of flags that do not divide the work among ranks.
constexpr std::string_view kOfAllRanks[] = {"Model",       "Attention", "Experts",  "Optimizer",
                                            "Checkpoints", "Sampling",  "Training", "Data",
                                            "Execution",   "Output",    "Planning"};
/// What `--model` says, too, where it is a preset.
constexpr std::string_view kOfPresets[] = {"hidden_size",  "num_layers",      "num_heads",
                                           "num_kv_heads", "ffn_hidden_size", "vocab_size"};

bool is_among(std::string_view name, std::span<const std::string_view> names) {
  return std::ranges::find(names, name) != names.end();
}

/// checkpoint.json of the newest one; null where there is none to read.
nlohmann::ordered_json newest_record(const std::string& run_dir) {
  const std::string directory = newest_checkpoint(run_dir);
  if (directory.empty()) return nullptr;
  try {
    return nlohmann::ordered_json::parse(checkpoint_record(directory));
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

void take_from_checkpoint(RunConfig& config, Args& args, int64_t ranks) {
  const nlohmann::ordered_json record = newest_record(config.run_dir);
  if (!record.is_object()) return;
  const nlohmann::ordered_json& flags = record.at("config");
  const auto divides = [&](const std::string& flag) {
    return !is_among(args.group_of(flag), kOfAllRanks);
  };
  bool same_layout = record.value("ranks", int64_t{0}) == ranks;
  for (const auto& [flag, value] : flags.items()) {
    same_layout = same_layout && !(args.typed(flag) && divides(flag));
  }
  const std::string model = flags.value("model", "");
  const bool is_directory = !is_preset(model) && std::filesystem::is_directory(model);
  const bool other_model = args.typed("model");
  std::vector<std::string> given;  // before any is taken
  for (const auto& [flag, value] : flags.items()) {
    if (args.typed(flag)) given.push_back(flag);
  }
  for (const auto& [flag, value] : flags.items()) {
    if (std::ranges::find(given, flag) != given.end() || is_among(flag, kOwn)) continue;
    if (divides(flag) && !same_layout) continue;
    const bool batch = flag == "micro_batch_size" || flag == "grad_acc_steps";
    const bool batch_is_given = std::ranges::find(given, "micro_batch_size") != given.end() ||
                                std::ranges::find(given, "grad_acc_steps") != given.end();
    if (batch && batch_is_given) continue;
    const bool of_model = args.group_of(flag) == "Model";
    if (of_model && other_model) continue;
    if (of_model && (flag == "model") != is_directory) continue;  // the shape says all of a preset
    args.take(flag, value.dump(), is_among(flag, kOfPresets));
  }
}

void keep_batch_of_checkpoint(RunConfig& config, const Args& args) {
  const nlohmann::ordered_json record = newest_record(config.run_dir);
  if (!record.is_object()) return;
  const int64_t wanted = record.at("global_batch_size"), found = config.global_batch_size();
  if (wanted == found) return;
  if (!args.typed("grad_acc_steps")) {
    const int64_t at_once = found / config.grad_acc_steps;
    if (wanted % at_once == 0) {
      config.grad_acc_steps = wanted / at_once;
      return;
    }
  }
  if (args.typed("micro_batch_size")) return;
  const int64_t ranks = found / (config.grad_acc_steps * config.micro_batch_size);
  const int64_t passes = args.typed("grad_acc_steps") ? config.grad_acc_steps : 1;
  if (wanted % (ranks * passes) != 0) return;
  const int64_t samples =
      wanted / (ranks * passes);  // of a rank, in all of its passes that are open
  if (args.typed("grad_acc_steps")) {
    config.micro_batch_size = samples;
    return;
  }
  config.micro_batch_size = std::gcd(samples, config.micro_batch_size);
  config.grad_acc_steps = samples / config.micro_batch_size;
}

}  // namespace usp
