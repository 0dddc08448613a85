#pragma once

#include <deque>
#include <functional>
#include <map>
#include <utility>

#include "comm/communicator.h"
#include "model.h"
#include "schedule.h"

namespace usp {

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
  /// `boundary`: the shape of what one stage hands to the next.
  Mail(const Schedule& schedule, const Communicator& pp, Shape boundary, DType dtype);

  void post(int64_t action);      ///< receives for this action, and all that come before it
  Tensor take(int64_t action);      ///< what it needs, complete; undefined: nothing
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
  Shape boundary_;
  DType dtype_;
  std::map<int64_t, StageMessage> to_send_;             // by action
  std::map<int64_t, int> expected_;                // by action: from which rank
  std::map<int, std::deque<StageMessage>> to_receive_;  // by sender, in its order
  std::map<int64_t, Receiving> receiving_;         // by action
  std::map<int64_t, Tensor> handed_over_;          // by action: from another chunk of this rank
  std::map<int, std::deque<Sending>> sending_;     // by receiver
};
// [mail]

// [pipeline]
/// A rank's stages of a model, and the one loop that runs any schedule.
class Pipeline {
 public:
  /// The micro-batch of this number.
  using TakeBatch = std::function<Pass(int64_t micro_batch)>;

  /// `pp`: the ranks of the pipeline. `boundary`: the shape of what one stage hands to the next.
  Pipeline(Model& model, Grads& grads, const Communicator& pp, Schedule schedule, Shape boundary,
           DType dtype)
      : model_(model),
        grads_(grads),
        pp_(pp),
        schedule_(std::move(schedule)),
        boundary_(std::move(boundary)),
        dtype_(dtype) {}

  /// A step: every micro-batch forward and backward, in the order of the schedule.
  void train(const TakeBatch& take_batch);
  /// The forward passes alone, of so many micro-batches, for the loss.
  void evaluate(int64_t micro_batches, const TakeBatch& take_batch);
  /// The logits of a pass, of which the head holds so many columns, on every rank of the pipeline.
  Tensor logits(const Pass& pass, int64_t columns);

  const Schedule& schedule() const { return schedule_; }

 private:
  struct InFlight;
  using Running = std::map<std::pair<int64_t, int64_t>, InFlight>;  // by chunk, micro-batch

  void run(const Schedule& schedule, const TakeBatch& take_batch, bool with_backward);
  /// The action's work on what another stage made; what the next one needs of it.
  Tensor forward(const Action& action, Tensor x, InFlight& own, bool with_backward);
  Tensor backward(const Action& action, Tensor dy, InFlight& own);

  Model& model_;
  Grads& grads_;
  const Communicator& pp_;
  Schedule schedule_;
  Shape boundary_;
  DType dtype_;
};
// [pipeline]

}  // namespace usp
