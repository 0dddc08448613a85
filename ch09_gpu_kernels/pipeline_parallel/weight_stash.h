#pragma once

#include <map>
#include <vector>

#include "data_parallel/strategy.h"
#include "optimizer.h"
#include "pipeline_parallel/stages.h"

namespace usp {

// [weight_stash]
/// PipeDream's versions of a stage's weights. Harlap et al. (2018), Narayanan et al. (2019).
///
/// A stage updates its weights after each backward pass, while other micro-batches are in flight.
/// Those have run forward with older weights. A gradient is that of a function only if backward
/// reads the weights that forward read, so a version is kept for as long as it may be read again.
///
/// Rank r of p does `ahead` = min(p-1-r, m-1) forward passes before its first backward pass. So
/// micro-batch i of a step reads version max(0, i - ahead), forward and backward, and its gradient
/// makes version i+1 out of version i. Besides the newest version there are at most `ahead`.
class WeightStash {
 public:
  /// They may have no memory yet.
  explicit WeightStash(ParameterList& parameters) : parameters_(parameters) {}

  /// This micro-batch goes forward, with the newest version.
  void begin_forward(int64_t micro_batch) { read_by_[micro_batch] = newest_; }
  /// From here on layers read the version with which this micro-batch went forward.
  void begin_backward(int64_t micro_batch);
  /// Layers read the newest version again.
  void end_backward(int64_t micro_batch);
  /// The newest version is about to be overwritten: copies it if a micro-batch in flight has read
  /// it.
  void begin_update();

 private:
  void read_from(const Tensor& flat);

  ParameterList& parameters_;
  int64_t newest_ = 0;                  // counts the updates
  std::map<int64_t, int64_t> read_by_;  // by micro-batch in flight: version
  std::map<int64_t, Tensor> older_;     // by version: as ParameterList::flat_values()
  std::vector<Tensor> free_;            // memory of versions that nobody will read again
};
// [weight_stash]

// [stage_update]
/// Updates a stage alone, in the middle of a step.
struct StageUpdate {
  int64_t before;  ///< updates of the run before this step
  double lr;
  Grads& grads;
  DataParallelStrategy& data_parallel;
  Optimizer& optimizer;

  /// From the gradients of this micro-batch; then opens a window for those of the next one.
  /// `stage`: the ranks that hold the stage.
  void operator()(int64_t micro_batch, const Communicator& stage) const;
};
// [stage_update]

}  // namespace usp
