#pragma once

#include <algorithm>

#include "comm/launch.h"
#include "state.h"
#include "technique/tiny_llama.h"
#include "testing.h"

/// Settings of the rehearsal on ranks next to the same on one process.
namespace usp::rehearsal {

inline constexpr int64_t kSteps = 3;

inline Setting small(bool tied = false) {
  Setting setting;
  setting.model.hidden_size = 16;
  setting.model.num_layers = 4;
  setting.model.num_heads = 4;
  setting.model.num_kv_heads = 2;
  setting.model.ffn_hidden_size = 22;
  setting.model.vocab_size = 61;
  setting.model.tie_word_embeddings = tied;
  return setting;
}

/// The setting with every technique in it; the mesh's sizes say on how many ranks.
inline Setting with_all_techniques(Setting setting) {
  setting.plan.sequence_parallel = true;
  setting.schedule = "zb_h1";
  setting.seq_len = 16;
  return setting;
}

/// Chapter 1's own model and training step on the batches of a setting with `dp` ranks.
class WholeTrainer {
 public:
  WholeTrainer(const Setting& setting, int64_t dp)
      : setting_(setting),
        batches_(batches_of(setting, dp)),
        engine_(0, 1),
        batch_source_(batches_, Communicator::world(engine_), {}),
        model_(test::allocated_model(setting.model, setting.seq_len, DType::f64,
                                     Probabilities::never_whole, 1)),
        grads_(model_.parameters()),
        optimizer_(model_.parameters(), optimizer_config()),
        loss_(Tensor::zeros({1}, DType::f64)) {}

  void train_step(int64_t step) {
    ops::fill(loss_, 0);
    grads_.begin_window(batches_.micro_batches);
    for (int64_t i = 0; i < batches_.micro_batches; ++i) {
      Pass pass = batch_source_.take_batch(step, i);
      pass.loss = loss_;
      model_.backward(model_.forward(pass), grads_, pass);
    }
    grads_.end_window();
    optimizer_.step(step, 0.01, optimizer_.grad_squares());
  }

  double loss() const { return loss_.item(); }
  double grad_norm() const { return optimizer_.grad_norm().item(); }
  ParameterList& parameters() { return model_.parameters(); }
  const Optimizer& optimizer() const { return optimizer_; }

 private:
  static Setting batches_of(Setting setting, int64_t dp) {
    setting.micro_batches *= dp;
    setting.plan = {};
    setting.zero_stage = 0;
    setting.schedule = "1f1b";
    setting.chunks = 1;
    return setting;
  }

  Setting setting_, batches_;
  DryEngine engine_;
  RehearsalTrainer batch_source_;
  Model model_;
  Grads grads_;
  Optimizer optimizer_;
  Tensor loss_;
};

inline State whole_model(const Setting& setting, int64_t dp = 1) {
  const test::OnDevice cpu;
  WholeTrainer trainer(setting, dp);
  return train_whole(trainer, kSteps);
}

/// The rehearsal's own trainer, alone: the reference for what chapter 1 does not have.
inline State alone(Setting setting, int64_t dp = 1) {
  const test::OnDevice cpu;
  DryEngine engine(0, 1);
  setting.micro_batches *= dp;
  setting.zero_stage = 0;
  RehearsalTrainer trainer(setting, Communicator::world(engine), {});
  return train_whole(trainer, kSteps);
}

inline void check(const Setting& setting, const MeshSizes& sizes, const State& expected,
                  const std::string& what,
                  const std::function<void(RehearsalTrainer&)>& also = nullptr) {
  INFO(what);
  const int64_t ranks = sizes.dp * sizes.pp * sizes.cp * sizes.tp;
  run_threads(static_cast<int>(ranks), [&](const Communicator& world) {
    RehearsalTrainer trainer(setting, world, sizes);
    Runtime::current().allocator().record_events(true);
    check_same_training(trainer, expected, what);
    if (also) also(trainer);
  });
}

}  // namespace usp::rehearsal
