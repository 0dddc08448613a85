#pragma once

#include "base/clock.h"
#include "tensor/work_timer.h"
#include "train_step.h"
#include "weight_stash.h"

namespace usp {

/// Refuses what a stage that updates its weights alone cannot do.
inline void check_updates_of_a_stage(const TrainConfig& run) {
  constexpr std::string_view why = "PipeDream updates each stage by itself, ";
  if (run.pipeline.pp_schedule != "1f1b") {
    refuse("stale_updates_in_one_order", {"--pp_schedule 1f1b"},
           "PipeDream works in the order of 1f1b, not of pp_schedule={}", run.pipeline.pp_schedule);
  }
  if (run.data_parallel.zero_stage > 0) {
    refuse("stale_updates_of_whole_weights", {"--zero_stage 0"},
           "{}with whole weights, which zero_stage={} shards", why, run.data_parallel.zero_stage);
  }
  if (run.model.tie_word_embeddings && run.pipeline.pp_size > 1) {
    refuse("stale_updates_of_one_stage", {"leave out --tie_word_embeddings", "--pp_size 1"},
           "{}but tie_word_embeddings has one weight on two stages", why);
  }
  if (run.tensor_parallel.halves() > 1) {
    refuse("stale_updates_after_micro_batches", {"--tp_overlap chunks"},
           "{}after a whole micro-batch, which tp_overlap=batch_halves cuts", why);
  }
  if (run.pipeline.overlap_dispatch) {
    refuse("stale_updates_between_passes", {"leave out --overlap_dispatch"},
           "{}but overlap_dispatch would run passes in turns that read different weight versions",
           why);
  }
  if (run.optimizer.grad_clip > 0) {
    refuse("stale_updates_without_norm", {"--grad_clip 0"},
           "{}so nobody has the norm of all gradients for grad_clip={}", why,
           run.optimizer.grad_clip);
  }
}

/// What a rank's passes and updates have taken, in seconds.
struct PipeDreamWork {
  double forward = 0, backward = 0, update = 0;
  double span = 0;  ///< from the first action of each step to its last update
  int64_t micro_batches = 0;

  /// The share of the span in which it worked on nothing. Updates are work.
  double idle() const { return span == 0 ? 0 : 1 - (forward + backward + update) / span; }
};

/// Trains as PipeDream first did: in the order of 1F1B, and each stage updates its weights after
/// each backward pass, with nothing between stages but activations and their gradients. What needs
/// all gradients of a step, such as their norm for clipping, it cannot have.
class PipeDream : public Trainer {
 public:
  PipeDream(const TrainConfig& config, const RunContext& context)
      : Trainer(config, context), stash_(model_.parameters()) {}

  /// A step of m updates. Its loss is the mean over the micro-batches, each before its own update.
  void train_step(int64_t step) override {
    step_begin_ = clock_ns();
    const double flops_before = Runtime::current().flops();
    const NoHostReads no_host_reads;
    const TraceScope trace("train_step");
    ops::fill(loss_, 0);
    run(step);
    tokens_ += config_.tokens_per_step();
    flops_ = Runtime::current().flops() - flops_before;
  }

  ReportRows report_rows() override;
  /// For between two steps.
  const PipeDreamWork& measured() const {
    timer_.read();
    return work_;
  }

 private:
  /// Adds the time that it lives to a sum.
  class Timed {
   public:
    Timed(WorkTimer& timer, double& sum) : timer_(timer), sum_(sum), begin_(timer.now()) {}
    ~Timed() {
      timer_.since(begin_, [&sum = sum_](double took) { sum += took; });
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

   private:
    WorkTimer& timer_;
    double& sum_;
    int64_t begin_;
  };

  /// A micro-batch from its forward to its backward pass.
  struct InFlight {
    Pass pass;
    Model::Activations activations;
  };

  void run(int64_t step) {
    timer_.read();  // what the step before took
    const Schedule& schedule = pipeline_.schedule();
    const std::vector<Action>& actions = schedule.actions[mesh_.pp().rank()];
    Mail mail(schedule, mesh_.pp(), boundary(),
              std::vector<int64_t>(schedule.micro_batches, tokens_of_micro_batch()));
    std::map<int64_t, InFlight> running;  // by micro-batch
    const Timed timed(timer_, work_.span);
    // [loop]
    for (int64_t i = 0; i < std::ssize(actions); ++i) {
      const int64_t micro_batch = actions[i].micro_batch;
      const bool is_forward = actions[i].work == Work::F;
      InFlight& own = running[micro_batch];
      if (is_forward) own.pass = take(step, micro_batch);
      Tensor in = mail.take(i);
      mail.post(i + 1);
      mail.send(i, is_forward ? forward(micro_batch, std::move(in), own)
                              : backward(micro_batch, std::move(in), own));
      if (is_forward) continue;
      running.erase(micro_batch);
      update(step, micro_batch);
    }
    // [loop]
  }

  Tensor forward(int64_t micro_batch, Tensor x, InFlight& own) {
    const Timed timed(timer_, work_.forward);
    stash_.begin_forward(micro_batch);
    return model_.forward_chunk(0, std::move(x), &own.activations, own.pass);
  }

  Tensor backward(int64_t micro_batch, Tensor dy, InFlight& own) {
    const Timed timed(timer_, work_.backward);
    // The loss is a mean over the step; an update's gradient is that of its micro-batch's mean.
    own.pass.loss_scale *= double(config_.grad_acc_steps);
    data_parallel_->begin_step(/*micro_batches=*/1);
    stash_.begin_backward(micro_batch);
    Tensor dx =
        model_.backward_chunk(0, std::move(dy), std::move(own.activations), grads_, own.pass);
    stash_.end_backward(micro_batch);
    return dx;
  }

  // [update]
  void update(int64_t step, int64_t micro_batch) {
    const int64_t m = config_.grad_acc_steps;
    const Tensor squares = finish_gradient();
    // 8 bytes: all ranks of a stage skip an update that is not finite, or none. The last one's norm
    // is reported, of all stages.
    (micro_batch + 1 < m ? mesh_.stage() : mesh_.world()).all_reduce(squares);
    const Timed timed(timer_, work_.update);
    const double lr = learning_rate(config_.optimizer, step, config_.steps);
    optimizer_.step(step * m + micro_batch, lr, squares);
    data_parallel_->after_update();
  }
  // [update]

  /// Keeps the version that will be overwritten, if it has to; the gradient is complete then.
  /// Returns the sum of its squares on this rank.
  Tensor finish_gradient() {
    const Timed timed(timer_, work_.update);
    ++work_.micro_batches;
    stash_.begin_update();
    grads_.end_window();
    data_parallel_->finish();
    return optimizer_.grad_squares();
  }

  Pass take(int64_t step, int64_t micro_batch) const {
    const int64_t samples = config_.micro_batch_size, ranks = mesh_.dp().size();
    const int64_t before = (step * config_.grad_acc_steps + micro_batch) * ranks;
    Pass pass = take_batch(Split::train, (before + mesh_.dp().rank()) * samples, samples);
    pass.micro_batch = micro_batch;
    pass.loss_scale = 1 / double(config_.tokens_per_step());
    return pass;
  }
  Boundary boundary() const {
    return {config_.model.hidden_size, config_.tensor_parallel.row_shares(),
            parse_dtype(config_.dtype)};
  }
  int64_t tokens_of_micro_batch() const {
    return config_.micro_batch_size * config_.seq_len / config_.context_parallel.cp_size;
  }

  WeightStash stash_;
  PipeDreamWork work_;
  mutable WorkTimer timer_;  // has what is still to be added to work_
};

/// The formulas of a rank under 1F1B, with the versions of its weights that it keeps besides.
inline Prediction predict_pipedream(const TrainConfig& config, int rank) {
  Prediction prediction = predict(config, rank);
  const int64_t older = WeightStash::most(config.pipeline.pp_size, config.mesh().place_of(rank).pp,
                                          config.grad_acc_steps);
  prediction.states.weights += older * prediction.states.weights;
  return prediction;
}

inline ReportRows PipeDream::report_rows() {
  ReportRows rows = prediction_rows(predict_pipedream(config_, mesh_.world().rank()));
  if (config_.pipeline.pp_size == 1) return rows;
  const PipeDreamWork& work = measured();
  const double each = 1e3 / double(std::max<int64_t>(1, work.micro_batches));
  rows.emplace_back("work of a stage",
                    fmt::format("forward {:.3g}, backward {:.3g}, update {:.3g} ms; rank 0 idles "
                                "{:.0f} % of its step",
                                each * work.forward, each * work.backward, each * work.update,
                                100 * work.idle()));
  return rows;
}

}  // namespace usp
