#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "tensor/launches.h"
#include "tensor/recorder.h"
#include "testing.h"
#include "train_step.h"

/// How often a step calls what --kernels fused joins: counted, and by formula.
namespace usp::test {

/// Calls by the name of the operation, or of the phase of a trace.
using CallCounts = std::map<std::string, int64_t>;

/// Counts what this rank calls while it lives. An operation that a backend makes of others, because
/// it has no kernel of its own, has the name that it was asked for: its launches on a GPU tell.
class CallCounter : public Recorder {
 public:
  CallCounter() { Runtime::current().tell(this); }
  ~CallCounter() override { Runtime::current().tell(nullptr); }

  void op(std::string_view name, int64_t, int64_t, std::span<const Tensor* const>, bool) override {
    end_op();
    ++calls[op_ = name];
  }
  int64_t post(const Posted&) override { return end_op(); }
  void wait(int64_t) override { end_op(); }
  void begin_phase(std::string_view name, int64_t, int64_t) override {
    end_op();
    ++calls[std::string(name)];
  }
  void end_phase() override { end_op(); }

  CallCounts calls;
  CallCounts launched;  ///< kernels on a GPU, by operation

 private:
  int64_t end_op() {
    const int64_t before = std::exchange(seen_, launches);
    if (!op_.empty()) launched[op_] += launches - before;
    op_.clear();
    return 0;
  }

  int64_t seen_ = launches;
  std::string op_;  // the last one, if nothing else has begun since
};

/// The calls of so many steps from step 0 on, by this rank.
inline CallCounts count_calls(Trainer& trainer, int64_t steps = 1) {
  CallCounter counter;
  for (int64_t step = 0; step < steps; ++step) trainer.train_step(step);
  return counter.calls;
}

/// Whether the rank's part of the norm has a parameter in it.
inline bool sums_squares(Trainer& trainer) {
  ParameterList& parameters = trainer.parameters();
  bool any = false;
  for (size_t i = 0; i < parameters.size(); ++i) any = any || parameters[i].counted;
  return any;
}

/// Calls of so many steps, of all ranks together, that `c` asks for with --kernels fused.
/// `summing`: ranks of which sums_squares() is true.
inline CallCounts fused_calls(const TrainConfig& c, int64_t summing, int64_t steps = 1) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t copies = c.mesh().ranks() / c.pipeline.pp_size;  // of each stage
  const int64_t passes = steps * copies * c.grad_acc_steps * c.tensor_parallel.halves();
  const int64_t L = c.model.num_layers, with_experts = c.model.experts.layers(0, L);
  const int64_t forwards = c.recompute == "full" ? 2 : 1;
  const int64_t tokens = c.samples_of_pass() * c.seq_len / c.context_parallel.cp_size;
  // Where ranks of tp sum, or elements are dropped, the residual is added afterwards.
  const bool onto_residual = c.tensor_parallel.tp_size == 1 && c.tensor_parallel.dropout == 0;
  // And so it is where they sum what each has of an expert's outputs.
  const bool onto_rows = c.tensor_parallel.tp_size == 1 || !c.expert_parallel.expert_tp;
  // Products of SwiGLU: of each layer's MLP or experts, and of those that all tokens share.
  // Backward makes each of them once more.
  const int64_t products = L + (c.model.experts.num_shared_experts > 0 ? with_experts : 0);
  // One call for the embedding, one for each layer, one for the last norm and the head. A rank with
  // both ends of a mirrored pipeline that builds the head first has the embedding's table there.
  const bool mirrors = c.pipeline.mirrors(c.grad_acc_steps);
  const int64_t updates = (mirrors ? 2 : 1) * (L + 2) - (mirrors && c.model.tie_word_embeddings);
  return {
      {"linear_cross_entropy", 2 * passes},
      {"cross_entropy_forward", ceil_div(tokens, c.fusion.loss_rows) * passes},
      {"cross_entropy_loss", passes},
      // Attention and MLP each end with a product onto the residual.
      {"linear_forward_add", onto_residual ? (2 * L - with_experts) * forwards * passes : 0},
      // Forward alone: a block that is made again leaves its last sum out.
      {"unpermute_add", onto_rows ? with_experts * passes : 0},
      {"swiglu_forward", products * (forwards + 1) * passes},
      {"sum_squares", steps * summing},
      {"adamw", steps * copies * updates},
  };
}

/// Which of them were not made as often as they should have been; "": none.
inline std::string differences(const CallCounts& found, const CallCounts& expected) {
  std::string text;
  for (const auto& [name, calls] : expected) {
    const auto of = found.find(name);
    const int64_t here = of == found.end() ? 0 : of->second;
    if (here != calls) text += fmt::format("{}: {} calls, by formula {}\n", name, here, calls);
  }
  return text;
}

}  // namespace usp::test
