#include "run/report.h"

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/machine.h"
#include "base/threads.h"
#include "tensor/console.h"
#include "tensor/runtime.h"

namespace usp {

RunFacts gather_facts(const TokenFile& file, const Dataset& dataset, const RunConfig& config) {
  RunFacts facts;
  facts.data_path = file.path();
  facts.data_sha256 = file.sha256();
  facts.data_is_text = file.is_text();
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

/// Such as 2026-11-29T21:00:00Z.
std::string utc(std::time_t time) {
  std::tm date{};
  gmtime_r(&time, &date);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &date)};
}

/// What may be another when a run is resumed.
nlohmann::ordered_json circumstances(const RunFacts& facts) {
  const Accelerator* accelerator = Runtime::current().accelerator();
  nlohmann::ordered_json json;
  json["command"] = facts.command;
  json["machine"] = {{"cpu", cpu_name()},
                     {"isa", instruction_sets()},
                     {"cores", available_cores()},
                     {"ranks", Runtime::current().world_size()},
                     {"threads", num_threads()}};
  if (accelerator != nullptr) json["machine"]["gpu"] = accelerator->description();
  json["build"] = {
      {"commit", build_commit()},
      {"compiler", compiler()},
      {"arch", build_architecture()},
      {"matmul", accelerator != nullptr ? accelerator->matmul_library() : matmul_library()}};
  json["matmul_gflops"] = facts.matmul_gflops;
  json["started"] = utc(std::time(nullptr));
  return json;
}

void write_json(const RunDir& run_dir, const nlohmann::ordered_json& json) {
  // A path need not be valid UTF-8; whatever is not becomes U+FFFD.
  run_dir.write("run.json",
                json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace

void write_record(const RunDir& run_dir, const RunFacts& facts) {
  nlohmann::ordered_json json = circumstances(facts);
  if (run_dir.resumes()) {
    std::ifstream file;
    if (std::filesystem::is_regular_file(run_dir.file("run.json"))) {
      file.open(run_dir.file("run.json"));
    }
    auto old = nlohmann::ordered_json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (old.is_object() && (!old.contains("resumed") || old["resumed"].is_array())) {
      old["resumed"].push_back(json);
      return write_json(run_dir, old);
    }
    // The checkpoint has all that a run needs to go on.
    print("{} is missing or damaged and is written anew; how the run began is lost.\n",
          run_dir.file("run.json"));
    json["resumed"] = {json};
  }
  json["chapter"] = facts.chapter;
  json["config"] = nlohmann::ordered_json::parse(facts.config_json);
  json["data"] = {{"path", facts.data_path},        {"sha256", facts.data_sha256},
                  {"text", facts.data_is_text},     {"train_tokens", facts.train_tokens},
                  {"val_tokens", facts.val_tokens}, {"unigram_entropy", facts.unigram_entropy}};
  json["parameters"] = facts.parameters;
  write_json(run_dir, json);
}

namespace {

/// What the progress lines went by, where that was another peak by more than a tenth.
std::string provisional_text(double first_gflops, double peak_gflops) {
  if (first_gflops <= 0 || peak_gflops <= 1.1 * first_gflops) return "";
  return fmt::format("; progress lines went by {:.1f}, measured before the run", first_gflops);
}

}  // namespace

void StepTimes::add(double ms) {
  if (steps_++ % every_ != 0) return;
  kept_.push_back(ms);
  if (kept_.size() <= kMost) return;
  every_ *= 2;
  for (size_t i = 1; 2 * i < kept_.size(); ++i) kept_[i] = kept_[2 * i];
  kept_.resize((kept_.size() + 1) / 2);
}

double StepTimes::median() const {
  std::vector<double> sorted = kept_;
  const auto middle = sorted.begin() + std::ssize(sorted) / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

ReportRows speed_rows(const RunSummary& summary, double peak_gflops) {
  if (summary.step_ms.steps() == 0) return {};
  const double median = summary.step_ms.median();
  StepMetrics typical = summary.last;
  typical.tokens_per_s *= typical.step_ms / median;
  typical.step_ms = median;
  typical.relate_to(peak_gflops);
  const double tokens = typical.tokens_per_s * typical.step_ms * 1e-3;
  const char* why_above = "; above 100 %, as it counts pairs behind the mask that nobody computes";
  return {
      {"speed", fmt::format("{:.0f} tokens/s: {:.3f} ms a step of {:.0f} tokens, median of {}",
                            typical.tokens_per_s, typical.step_ms, tokens, summary.step_ms.kept())},
      {"MFU", fmt::format("{} of the matmul library's {:.1f} GFLOP/s, "
                          "needed below the causal mask",
                          utilisation_text(typical.mfu), peak_gflops)},
      {"MFU, no mask", fmt::format("{:.0f} %, by the book's count, which has no causal mask{}",
                                   100 * typical.book_mfu,
                                   typical.book_mfu > 1 && typical.hfu <= 1 ? why_above : "")},
      {"HFU", fmt::format("{}, by what was carried out: recomputation counts",
                          utilisation_text(typical.hfu))}};
}

Report make_report(const RunFacts& facts, const RunSummary& summary, double peak_gflops,
                   const ReportRows& rows, std::string sample) {
  Report report;
  report.chapter = facts.chapter;
  const StepMetrics& last = summary.last;
  const std::optional<double>& val_loss = summary.val_loss;
  const auto row = [&](const char* what, std::string value) {
    report.rows.emplace_back(what, std::move(value));
  };
  const auto append = [&](const ReportRows& more) {
    report.rows.insert(report.rows.end(), more.begin(), more.end());
  };
  row("parameters", fmt::format("{} in {}", facts.parameters, facts.dtype));
  row("trained", fmt::format("{} steps, {} tokens", last.step, last.tokens));
  if (summary.skipped.count() > 0) row("skipped updates", summary.skipped.text(last.step));
  row("training loss", fmt::format("{:.4f} nats per token, last step", last.loss));
  if (val_loss) row("validation loss", fmt::format("{:.4f} nats per token", *val_loss));
  row("token frequencies alone", fmt::format("{:.4f} nats per token", facts.unigram_entropy));
  append(speed_rows(summary, peak_gflops));
  for (auto& [what, value] : report.rows) {
    if (what == "MFU") value += provisional_text(facts.matmul_gflops, peak_gflops);
  }
  append(rows);
  if (summary.diverged) {
    report.verdict = "Training has diverged: the run was ended.";
  } else if (val_loss) {
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
