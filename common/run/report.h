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
  int64_t train_tokens = 0;
  int64_t val_tokens = 0;
  double unigram_entropy = 0;  ///< nats per token
  int64_t parameters = 0;
  double matmul_gflops = 0;  ///< measured at start-up
  std::string dtype;
  std::string chapter;
};

/// What is known before the model exists.
RunFacts gather_facts(const TokenFile& file, const Dataset& dataset, const RunConfig& config);

/// The line that opens a run: model, batch, machine, directory.
std::string headline(const RunFacts& facts, const RunConfig& config);

/// Writes run.json; where a run is resumed, adds under what circumstances.
void write_record(const RunDir& run_dir, const RunFacts& facts);

/// What happened, for people.
struct Report {
  ReportRows rows;
  std::string verdict;  ///< whether the model has learnt to use context; empty if not validated
  std::string sample;   ///< text from the trained model; may be empty

  std::string chapter;

  std::string markdown() const;  ///< report.md
  std::string text() const;      ///< the same for a terminal
};

/// `rows`: the trainer's.
Report make_report(const RunFacts& facts, const StepMetrics& last, std::optional<double> val_loss,
                   const ReportRows& rows, std::string sample);

}  // namespace usp
