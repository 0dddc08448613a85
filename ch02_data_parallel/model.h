#pragma once

#include <memory>
#include <vector>

#include "layers.h"

namespace usp {

/// A Llama as a list of blocks: embedding, num_layers blocks of two segments, head.
class Model {
 public:
  /// What backward needs of one micro-batch: a Saved for every segment of every block.
  using Activations = std::vector<std::vector<Saved>>;

  /// Parameters are allocated and initialised on the current runtime's device. `seq_len` is the
  /// longest sequence a pass may have; `store_probabilities` chooses naive attention.
  Model(const ModelConfig& config, int64_t seq_len, DType dtype, bool store_probabilities,
        uint64_t seed);

  /// Adds the micro-batch's share of the loss to pass.loss and returns what backward needs.
  Activations forward(const Pass& pass);
  /// Consumes the activations, block by block from the last, and hands every weight gradient to
  /// `grads`.
  void backward(Activations activations, Grads& grads, const Pass& pass);
  /// As forward(), keeping nothing for a backward pass.
  void evaluate(const Pass& pass);
  /// Logits [T, V] of every position.
  Tensor logits(const Pass& pass);

  ParameterList& parameters() { return parameters_; }

 private:
  using Block = std::vector<std::unique_ptr<Segment>>;

  ParameterList parameters_;
  std::vector<Block> blocks_;
};

/// Floating-point operations that training on one token needs, as the book counts them: 6 per
/// weight of a matmul (a lookup is none), and 12 L h s for attention without regard to the causal
/// mask.
double model_flops_per_token(const ModelConfig& config, int64_t seq_len);

}  // namespace usp
