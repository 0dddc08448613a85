#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files/data.h"
#include "files/run_dir.h"
#include "run/metrics.h"
#include "run/run_config.h"
#include "run/trainer_base.h"

namespace usp {

/// The facts of a run that its record and its report share.
struct RunFacts {
  std::vector<std::string> command;
  std::string config_json;
  std::string data_path;
  std::string data_sha256;
  bool data_is_text = false;  ///< whose bytes are the tokens
  int64_t train_tokens = 0;
  int64_t val_tokens = 0;
  double unigram_entropy = 0;  ///< nats per token
  int64_t parameters = 0;
  double matmul_gflops = 0;  ///< of all ranks together; measured at start-up
  std::string dtype;
  std::string chapter;
};

/// What is known before the model exists.
RunFacts gather_facts(const TokenFile& file, const Dataset& dataset, const RunConfig& config);

/// The line that opens a run: model, batch, machine, directory.
std::string headline(const RunFacts& facts, const RunConfig& config);

/// Writes run.json; where a run is resumed, adds under what circumstances.
void write_record(const RunDir& run_dir, const RunFacts& facts);

/// How long the steps of a run took. A long run keeps each second, fourth, eighth ... of them, so
/// that at most `kMost` are kept.
class StepTimes {
 public:
  static constexpr size_t kMost = 4096;

  void add(double ms);                                ///< of the next step
  int64_t steps() const { return steps_; }            ///< that this program has run
  int64_t kept() const { return std::ssize(kept_); }  ///< that the median is of
  double median() const;                              ///< of those kept; there has to be one

 private:
  int64_t steps_ = 0, every_ = 1;
  std::vector<double> kept_;
};

/// How the steps went.
struct RunSummary {
  StepMetrics last;
  StepTimes step_ms;
  SkippedSteps skipped;
  std::optional<double> val_loss;
  int64_t skipped_in_a_row = 0;  ///< the last updates
  bool diverged = false;         ///< they were enough to end the run
};

/// What happened, for people.
struct Report {
  ReportRows rows;
  std::string verdict;  ///< whether the model has learnt to use context; empty if not validated
  std::string sample;   ///< text from the trained model; may be empty

  std::string chapter;

  std::string markdown() const;  ///< report.md
  std::string text() const;      ///< the same for a terminal
};

/// Median speed, and utilisation at that speed. `peak_gflops`: the best rate that was measured.
ReportRows speed_rows(const RunSummary& summary, double peak_gflops);

/// `rows`: the trainer's.
Report make_report(const RunFacts& facts, const RunSummary& summary, double peak_gflops,
                   const ReportRows& rows, std::string sample);

}  // namespace usp
