#include "run/report.h"

#include <fmt/chrono.h>

#include <chrono>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/machine.h"
#include "base/threads.h"
#include "tensor/runtime.h"

namespace usp {

RunFacts gather_facts(const TokenFile& file, const Dataset& dataset, const RunConfig& config) {
  RunFacts facts;
  facts.data_path = file.path();
  facts.data_sha256 = file.sha256();
  facts.train_tokens = dataset.train_tokens();
  facts.val_tokens = dataset.val_tokens();
  facts.unigram_entropy = dataset.unigram_entropy(config.model.vocab_size);
  facts.dtype = config.dtype;
  facts.chapter = config.chapter;
  return facts;
}

std::string headline(const RunFacts& facts, const RunConfig& config) {
  const int ranks = Runtime::current().world_size(), threads = num_threads();
  return fmt::format(
      "{:.2f}M parameters in {}, {} tokens a step, {} training tokens; {} rank{} x {} thread{}; {}",
      double(facts.parameters) * 1e-6, facts.dtype, config.tokens_per_step(), facts.train_tokens,
      ranks, ranks == 1 ? "" : "s", threads, threads == 1 ? "" : "s", config.run_dir);
}

namespace {

/// What may be another when a run is resumed.
nlohmann::ordered_json circumstances(const RunFacts& facts) {
  nlohmann::ordered_json json;
  json["command"] = facts.command;
  json["machine"] = {{"cpu", cpu_name()},
                     {"isa", instruction_sets()},
                     {"cores", available_cores()},
                     {"ranks", Runtime::current().world_size()},
                     {"threads", num_threads()}};
  json["build"] = {{"commit", build_commit()},
                   {"compiler", compiler()},
                   {"arch", build_architecture()},
                   {"matmul", matmul_library()}};
  json["matmul_gflops"] = facts.matmul_gflops;
  json["started"] = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  return json;
}

void write_json(const RunDir& run_dir, const nlohmann::ordered_json& json) {
  // A path need not be valid UTF-8; whatever is not becomes U+FFFD.
  run_dir.write("run.json",
                json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace

void write_record(const RunDir& run_dir, const RunFacts& facts) {
  if (run_dir.resumes()) {
    std::ifstream file(run_dir.file("run.json"));
    auto json = nlohmann::ordered_json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) fail("{} is no JSON object", run_dir.file("run.json"));
    json["resumed"].push_back(circumstances(facts));
    write_json(run_dir, json);
    return;
  }
  nlohmann::ordered_json json = circumstances(facts);
  json["chapter"] = facts.chapter;
  json["config"] = nlohmann::ordered_json::parse(facts.config_json);
  json["data"] = {{"path", facts.data_path},
                  {"sha256", facts.data_sha256},
                  {"train_tokens", facts.train_tokens},
                  {"val_tokens", facts.val_tokens},
                  {"unigram_entropy", facts.unigram_entropy}};
  json["parameters"] = facts.parameters;
  write_json(run_dir, json);
}

Report make_report(const RunFacts& facts, const StepMetrics& last, std::optional<double> val_loss,
                   const ReportRows& rows, std::string sample) {
  Report report;
  report.chapter = facts.chapter;
  const auto row = [&](const char* what, std::string value) {
    report.rows.emplace_back(what, std::move(value));
  };
  row("parameters", fmt::format("{} in {}", facts.parameters, facts.dtype));
  row("trained", fmt::format("{} steps, {} tokens", last.step + 1, last.tokens));
  row("training loss", fmt::format("{:.4f} nats per token, last step", last.loss));
  if (val_loss) row("validation loss", fmt::format("{:.4f} nats per token", *val_loss));
  row("token frequencies alone", fmt::format("{:.4f} nats per token", facts.unigram_entropy));
  row("speed", fmt::format("{:.0f} tokens/s, last step", last.tokens_per_s));
  row("MFU", fmt::format("{:.0f} % of the {:.0f} GFLOP/s of the matmul library", 100 * last.mfu,
                         facts.matmul_gflops));
  if (last.hfu > last.mfu) {
    row("HFU", fmt::format("{:.0f} %, with what is computed twice", 100 * last.hfu));
  }
  report.rows.insert(report.rows.end(), rows.begin(), rows.end());
  if (val_loss) {
    report.verdict =
        *val_loss < facts.unigram_entropy
            ? "The validation loss is below the entropy of the token frequencies: the model uses "
              "context."
            : "The validation loss is not below the entropy of the token frequencies: the model "
              "has not learnt to use context.";
  }
  report.sample = std::move(sample);
  return report;
}

std::string Report::markdown() const {
  std::string text = fmt::format("# Run of {}\n\n| | |\n|---|---|\n", chapter);
  for (const auto& [what, value] : rows) text += fmt::format("| {} | {} |\n", what, value);
  if (!verdict.empty()) text += fmt::format("\n{}\n", verdict);
  if (!sample.empty()) {
    text += fmt::format("\n## A sample of what it learnt\n\n~~~~~text\n{}\n~~~~~\n", sample);
  }
  return text;
}

std::string Report::text() const {
  std::string text;
  for (const auto& [what, value] : rows) text += fmt::format("{:<25}{}\n", what, value);
  if (!verdict.empty()) text += fmt::format("\n{}\n", verdict);
  if (!sample.empty()) text += fmt::format("\nA sample of what it learnt:\n{}\n", sample);
  return text;
}

}  // namespace usp
