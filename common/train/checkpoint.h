#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "base/args.h"
#include "base/peers.h"
#include "files/run_dir.h"
#include "train/parameter.h"

namespace usp {

struct RunConfig;

/// When checkpoints are written, and whether a run begins from one.
struct CheckpointConfig {
  int64_t checkpoint_interval = 0;  ///< steps from one to the next; 0: none
  int64_t keep_checkpoints = 2;     ///< older ones are removed
  bool resume = false;              ///< continue the run in run_dir

  void bind(Args& args);
  void validate(const Args& args) const;
  void check(const RunConfig&) const {}  ///< they go together with everything
};

/// What the optimizer remembers between steps: one value for each element of the parameters'
/// shards, side by side in the order of their list.
struct OptimizerState {
  std::string name;
  Tensor values;
};

/// All that a training step changes. Whatever else a step reads is a function of the configuration
/// and the step's number.
struct TrainState {
  ParameterList& parameters;
  std::vector<OptimizerState> optimizer;
  int64_t& tokens;  ///< trained on so far
  /// What steps change though no gradient does, and the optimizer knows nothing of; with a shard
  /// whose master is its value.
  std::vector<Parameter*> buffers = {};
};

/// The inputs that determine what a run computes. A checkpoint may be resumed by a run with the
/// same ones. How a global batch is divided among ranks and micro-batches is none of them: results
/// then agree up to rounding.
struct RunIdentity {
  std::string config_json;  ///< every flag, as Args::to_json() gives them
  int64_t global_batch_size = 0;
  std::string data_sha256;
  /// Flags that are no input, or that another field stands for; Args::may_differ_on_resume().
  std::set<std::string> may_differ;
  /// Flags of may_differ that decide what this run computes after all; Args::decisive(). A run that
  /// resumes another one has to agree with it about those of either.
  std::vector<std::string> decisive = {};
  bool data_is_text = false;  ///< whose bytes are the tokens; the digest of the data says as much
};

/// Where the newest checkpoint of a run lies: its directory, with the files described at
/// write_checkpoint(); empty if there is none.
std::string newest_checkpoint(const std::string& run_dir);

/// What checkpoint.json in a checkpoint's directory says, found to be as it was written. Throws
/// Error where it is not.
std::string checkpoint_record(const std::string& directory);

/// Writes RUN_DIR/checkpoints/step-NNNNNNNN: every rank writes the shards that it counts to a file
/// of its own. Everything goes to a directory of another name first, is brought to the disk, and
/// gets its name last, from rank 0: at any moment, a checkpoint is whole or is not there. Throws
/// Error (a full disk on any rank, an element that no rank or more than one counts), and what was
/// there before stays. All ranks call it.
///
/// `state-00000-of-00004.safetensors`, or `state.safetensors` where one rank writes all, holds four
/// tensors for each parameter: under its own name the weight; NAME/master where the optimizer
/// updates a master weight; and NAME/ with the names of the optimizer's states. For a buffer, which
/// stands among the parameters, it holds one. A rank's part of a
/// parameter that is not its whole local tensor has one axis. The metadata entry `parameters` is a
/// JSON object that says for each name the global shape, the rank's slices of it ([axis, offset,
/// length]) and the range of their flattened elements that the file holds. `checkpoint.json` says
/// step, tokens, flags, and for every file its size and the SHA-256 of each MiB; its last entry is
/// the SHA-256 of all that stands before.
void write_checkpoint(const std::string& run_dir, int64_t step, const TrainState& state,
                      const RunIdentity& identity, const Peers& peers = alone());

/// Reads a checkpoint back, however many ranks have written it and whatever parts of the weights
/// they held; returns its step. All ranks together first check that every byte is as it was
/// written; then each reads the elements of its shards. Weights of other ranks' shards become
/// stale, which their version shows. Throws Error that names the file, and the bytes that differ or
/// the elements that are missing. Throws UsageError where the run has another identity. After
/// either, no rank has changed anything. All ranks call it.
int64_t load_checkpoint(const std::string& directory, const TrainState& state,
                        const RunIdentity& identity, const Peers& peers = alone());

/// The checkpoints of a run as it goes. All its ranks, `peers`, call everything here.
class Checkpoints {
 public:
  Checkpoints(const RunDir& run_dir, CheckpointConfig config, RunIdentity identity,
              const Peers& peers = alone());

  /// Sets `state` to that of the newest checkpoint and returns how many steps it has finished.
  /// Without --checkpoint_interval, the interval of the interrupted run holds. Throws UsageError if
  /// there is none or if it has finished more than the `steps` of the run, and Error if it is
  /// damaged, saying which older one is whole.
  int64_t resume(const TrainState& state, int64_t steps);
  /// How many steps were finished before this run resumed; 0 if it did not.
  int64_t resumed_at() const { return resumed_at_; }
  /// Writes a checkpoint where one is due after this many steps; removes the oldest beyond
  /// keep_checkpoints.
  void after_step(int64_t finished_steps, const TrainState& state);
  /// Writes one after the last step, however the run comes to its end.
  void at_end(int64_t finished_steps, const TrainState& state);

 private:
  void write(int64_t finished_steps, const TrainState& state);

  const RunDir& run_dir_;
  CheckpointConfig config_;
  RunIdentity identity_;
  const Peers& peers_;
  int64_t resumed_at_ = 0;
  int64_t last_ = 0;  ///< finished steps of the newest one
};

}  // namespace usp
