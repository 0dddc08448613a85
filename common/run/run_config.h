#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/args.h"
#include "base/rules.h"
#include "comm/mesh.h"
#include "run/comm_config.h"
#include "train/checkpoint.h"
#include "train/model_config.h"

namespace usp {

struct RunConfig;

/// The text that a trained model writes at the end of a run.
struct SampleConfig {
  int64_t sample_tokens = 256;
  double temperature = 0.8;
  int64_t top_k = 40;  ///< 0: all tokens
  std::string prompt = "The ";
  bool no_kv_cache = false;  ///< run all that the model sees again for every token
  std::string prompt_ids;    ///< the prompt as token ids; empty: the text

  void bind(Args& args);
  void validate(const Args& args) const;
  /// Throws UsageError where the prompt is not of the model's tokens.
  void check(const RunConfig& run) const;
};

/// What a Session needs to know of a run. A chapter's TrainConfig adds what the chapter is about.
/// Field = flag = the field's standard name.
struct RunConfig {
  /// The largest a micro-batch can be; with the limits of the other sizes, what is counted in a
  /// step stays below 2^63.
  static constexpr int64_t kMaxTokensAtOnce = int64_t{1} << 27;

  ModelConfig model;
  CheckpointConfig checkpoints;
  SampleConfig sample;
  std::optional<CommConfig> communication;  ///< where there may be several ranks

  int64_t steps = 400;
  int64_t seq_len = 256;         ///< tokens per sample
  int64_t micro_batch_size = 8;  ///< samples per forward
  int64_t grad_acc_steps = 1;    ///< micro-batches per optimizer step
  int64_t seed = 1;
  int64_t max_skipped_steps = 10;  ///< this many updates left out in a row end the run; 0: none do
  std::string dtype = "f32";
  std::string device = "auto";
  bool allow_oversize = false;  ///< start a run that needs more memory than there is

  std::string data;  ///< empty: the project's own corpus
  std::string token_dtype = "uint16";
  std::string data_order = "shuffled";
  double val_fraction = 0.1;
  int64_t eval_interval = 50;  ///< steps between validations; 0: none
  int64_t eval_samples = 64;   ///< validation samples each time; 0: no validation

  std::string chapter;  ///< the program's name
  std::string run_dir;
  bool overwrite = false;
  int64_t trace_steps = 3;
  bool estimate = false;
  std::string estimate_file;  ///< empty: none
  double device_memory = 80;  ///< GiB that a rank has, for what is planned and not run

  /// `several_ranks`: the flags of communication, where there may be several.
  explicit RunConfig(std::string chapter_name, std::optional<CommConfig> several_ranks = {})
      : communication(std::move(several_ranks)),
        chapter(std::move(chapter_name)),
        run_dir("runs/" + chapter) {}
  virtual ~RunConfig() = default;

  /// Samples of an optimizer step, over all ranks.
  int64_t global_batch_size() const { return micro_batch_size * grad_acc_steps * mesh().dp; }
  int64_t tokens_per_step() const { return global_batch_size() * seq_len; }
  /// A rank's share of a step's work, as a number of tokens, where all ranks do equally much.
  double tokens_per_rank() const { return double(tokens_per_step()) / double(mesh().ranks()); }
  /// Checks, of data that are text, whether bytes are the model's tokens, and those of the prompt
  /// are too; throws UsageError.
  void validate_text() const;
  /// Samples that go through the model at once, in training as in evaluation.
  virtual int64_t samples_of_pass() const { return micro_batch_size; }
  /// The ranks that the flags ask for.
  virtual MeshSizes mesh() const { return {}; }
  /// What the ranks exchange tensors by.
  EngineKind engine() const;

  /// Another one of its kind, as it is before any flag is read.
  virtual std::unique_ptr<RunConfig> fresh() const = 0;
  virtual void bind(Args& args) = 0;
  /// Fills what the command line left open and depends on the number of ranks.
  virtual void spread_over(int64_t /*world_size*/, const Args&) {}
  /// Resolves the model preset, and refuses impossible values and what does not go together; throws
  /// UsageError.
  virtual void validate(const Args& args) = 0;

 protected:
  ///@{
  /// Binds some of these fields, under a heading of their own in --help.
  void bind_training(Args& args);
  void bind_data(Args& args);
  void bind_execution(Args& args);
  void bind_output(Args& args);
  ///@}
  /// Of these fields; the parts validate themselves.
  void validate_run() const;

 private:
  void validate_sizes() const;
};

}  // namespace usp
