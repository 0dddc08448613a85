#pragma once

#include "technique/tiny_llama.h"

namespace usp::test {

inline constexpr int64_t kSeqLen = 6;  ///< of a Window's samples

/// One window of micro-batches: its loss, and the gradients through explicit backward passes.
class Window {
 public:
  Window(const ModelConfig& config, bool naive, int64_t micro_batches)
      : model_(allocated_model(config, kSeqLen, DType::f64, probabilities_of(naive), /*seed=*/1)),
        grads_(model_.parameters()),
        loss_(Tensor::zeros({1}, DType::f64)) {
    randomize(model_.parameters(), 2);
    Random random(3);
    const double scale = 1 / double(micro_batches * 2 * kSeqLen);
    for (int64_t i = 0; i < micro_batches; ++i) {
      passes_.push_back(random_pass(random, config, 2, kSeqLen, scale, loss_));
    }
  }

  double loss() {
    ops::fill(loss_, 0);
    for (const Pass& pass : passes_) model_.evaluate(pass);
    return loss_.item();
  }

  void backward() {
    ops::fill(model_.parameters().flat_grads(), kNaN);
    grads_.begin_window(std::ssize(passes_));
    for (const Pass& pass : passes_) model_.backward(model_.forward(pass), grads_, pass);
    grads_.end_window();
  }

  ParameterList& parameters() { return model_.parameters(); }

 private:
  Model model_;
  Grads grads_;
  Tensor loss_;
  std::vector<Pass> passes_;
};

}  // namespace usp::test
