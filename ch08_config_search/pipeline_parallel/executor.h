#pragma once

#include <deque>
#include <functional>
#include <map>
#include <utility>

#include "comm/communicator.h"
#include "model.h"
#include "pipeline_parallel/schedule.h"
#include "tensor/work_timer.h"

namespace usp {

/// What one stage hands to the next: rows of the residual stream.
struct Boundary {
  int64_t hidden_size;
  int64_t row_shares;  ///< ranks beside this one that shard the rows
  DType dtype;

  Shape shape(int64_t tokens) const { return {tokens / row_shares, hidden_size}; }
};

// [mail]
/// What a rank sends and receives while it goes through a schedule: activations to the next stage,
/// gradients to the one before.
///
/// A receive is posted an action ahead, so that it arrives while the one before computes, and in
/// the order in which its sender sends. A send is over when something arrives that its receiver
/// sent after having used it: no rank ever waits for one of its own messages, and when its memory
/// is free does not depend on timing.
class Mail {
 public:
  /// `tokens`: of each micro-batch.
  Mail(const Schedule& schedule, const Communicator& pp, const Boundary& boundary,
       std::vector<int64_t> tokens);

  void post(int64_t action);    ///< receives for this action, and all that come before it
  Tensor take(int64_t action);  ///< what it needs, complete; undefined: nothing
  void send(int64_t action, Tensor tensor);  ///< its output, if another rank uses it

 private:
  struct Receiving {
    StageMessage message;
    Tensor tensor;
    Handle handle;
  };
  struct Sending {
    int64_t used_by;  // action of the receiver
    Handle handle;
  };

  const Communicator& pp_;
  Boundary boundary_;
  std::vector<int64_t> tokens_;
  std::map<int64_t, StageMessage> to_send_;             // by action
  std::map<int64_t, int> expected_;                     // by action: from which rank
  std::map<int, std::deque<StageMessage>> to_receive_;  // by sender, in its order
  std::map<int64_t, Receiving> receiving_;              // by action
  std::map<int64_t, Tensor> handed_over_;       // by action: from another chunk of this rank
  std::map<int, std::deque<Sending>> sending_;  // by receiver
};
// [mail]

/// What a rank's work in training steps has taken, by the clock of the device that does it.
struct MeasuredWork {
  double seconds[4] = {};   ///< by Work: of all actions that ran alone
  int64_t actions[4] = {};  ///< by Work
  double in_turns = 0;      ///< seconds of those that did not
  double span = 0;          ///< seconds from the first action of each step to the end of the last
  bool keeps_all = false;   ///< of every action, too
  std::vector<double> all[4] = {};  ///< seconds of each action, by Work
  std::string times = {};           ///< what the ranks have agreed on, as pp_times has it

  /// An action that took this many seconds; or two, in turns, of which this is the first.
  void add(const Action& action, double took);
  double mean(Work work) const {
    const auto i = static_cast<int>(work);
    return actions[i] == 0 ? 0 : seconds[i] / double(actions[i]);
  }
  double median(Work work) const;  ///< of those in `all`
  /// The share of the span in which it worked on nothing.
  double idle() const {
    const double worked = seconds[0] + seconds[1] + seconds[2] + seconds[3] + in_turns;
    return span == 0 ? 0 : 1 - worked / span;
  }
};

// [pipeline]
/// A rank's stages of a model, and the one loop that runs any schedule.
class Pipeline {
 public:
  /// The micro-batch of this number.
  using TakeBatch = std::function<Pass(int64_t micro_batch)>;

  /// Says of the model's parameters which of them other stages hold, too: they have no memory yet.
  Pipeline(const TrainConfig& config, Model& model, Grads& grads, const TensorRegion& region,
           const Mesh& mesh);

  /// A step: every micro-batch forward and backward, in the order of the schedule. Halves of them,
  /// where those run in turns on a pipeline of one rank.
  void train(const TakeBatch& take_batch);
  /// The forward passes alone, for the loss. On every rank of the pipeline the passes are over the
  /// same samples.
  void evaluate(const std::vector<Pass>& passes);
  /// The logits of a pass, on every rank of the pipeline.
  Tensor logits(const Pass& pass);
  /// What its actions have taken. For between two steps.
  const MeasuredWork& measured() const {
    timer_.read();
    return measured_;
  }
  /// The micro-batches of a step that each chunk of this rank sees.
  int64_t micro_batches_of_chunk() const {
    return schedule_.stages.share_of(schedule_.micro_batches);
  }

  const Schedule& schedule() const { return schedule_; }

 private:
  struct InFlight;

  void run(const Schedule& schedule, std::vector<int64_t> tokens, const TakeBatch& take_batch,
           bool with_backward);
  /// The action's work on what another stage made; what the next one needs of it.
  Tensor work_on(const Action& action, Tensor in, InFlight& own, bool with_backward);
  /// Measures the action, or two in turns of which it is the first, which began at that point.
  void add_time(const Action& action, int64_t begin);
  /// With pp_times=measured, after a step: once there are enough, the ranks agree on what work and
  /// messages take, and their schedule is made anew. Collective.
  void learn_times();
  double message_seconds() const;  ///< median, between the first two stages; 0 on the others

  Model& model_;
  Grads& grads_;
  const TensorRegion& region_;
  PipelineConfig config_;
  const Communicator& world_;
  const Communicator& pp_;
  Schedule schedule_;
  Boundary boundary_;
  int64_t steps_ = 0;
  int64_t tokens_;   ///< of a micro-batch
  int64_t columns_;  ///< of the logits that the head makes
  MeasuredWork measured_;
  mutable WorkTimer timer_;  ///< has what is still to be added to measured_
};
// [pipeline]

}  // namespace usp
