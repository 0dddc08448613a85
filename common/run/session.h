#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "files/run_dir.h"
#include "run/estimate.h"
#include "run/memory_check.h"
#include "run/report.h"
#include "run/run_config.h"
#include "run/run_data.h"
#include "run/start_profile.h"
#include "run/trainer_base.h"
#include "tensor/runtime.h"

namespace usp {

/// One run of a chapter's program, from the command line to the report: what every chapter does
/// alike and is no lesson of any. All ranks of `world` call everything here, in this order.
class Session {
 public:
  /// `config` has to outlive the session, which fills it.
  Session(RunConfig& config, const Communicator& world);

  /// Reads the command line into the configuration and gives this rank its Runtime. Returns false
  /// where the run ends here with success (--help, --version). Throws UsageError.
  bool parse(int argc, char** argv);

  /// --estimate: prints what a step would need, of all ranks that differ; with --estimate_file,
  /// writes it too. Returns the exit code.
  int estimate(const std::vector<RankEstimate>& ranks) const;

  /// Prints the answer to what else the command line asks for instead of training. Returns the exit
  /// code.
  int answer(const std::string& text) const;

  /// Every flag with its value, as a JSON object.
  std::string flags() const { return args_.to_json(); }

  /// Opens the mesh, data, run directory and connections. Throws UsageError, on all ranks, where
  /// any rank cannot have them, or where a step needs, as `predict` says, more memory than there
  /// is.
  void open(const Predict& predict);

  /// Trains, validates, saves, resumes, samples and writes the run's files. Returns the exit code.
  /// `make` builds what trains. What it finds wrong is refused, on all ranks: no step is begun yet.
  int train(const std::function<std::unique_ptr<TrainerBase>(const RunContext&)>& make);

 private:
  void move_to_device();
  void choose_attention(const Predict& predict);
  bool accepts_naive_attention() const;
  void check_same_run() const;
  void check_same_data() const;
  void unless_refused(const std::function<void()>& start);
  RunSummary run_steps(TrainerBase& trainer, Checkpoints& checkpoints, MetricsWriter& file);
  std::string sample(TrainerBase& trainer) const;
  void write_records(ReportRows& rows);
  bool stop_requested_anywhere() const;
  int end(const RunSummary& summary, bool stopped);
  /// For the command line: one rank may estimate what several would do, whose number flags say.
  int64_t ranks() const { return world_.size() > 1 ? world_.size() : 0; }
  double matmul_gflops() const;

  StartProfile start_;
  RunConfig& config_;
  const Communicator world_;
  Args args_;
  std::vector<std::string> command_;
  std::optional<Runtime> runtime_;
  std::optional<Runtime::Use> use_;
  std::optional<Mesh> mesh_;
  std::unique_ptr<RunData> data_;
  std::optional<RunDir> run_dir_;
  Connection connection_;
  RunFacts facts_;
  std::string attention_line_;  ///< where it was chosen here: which, and why
};

}  // namespace usp
