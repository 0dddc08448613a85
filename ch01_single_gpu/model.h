#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "layers.h"

namespace usp {

/// The part of the model that a pipeline stage or a recomputation treats as one.
using Block = std::vector<std::unique_ptr<Segment>>;

/// Consecutive blocks: [begin, end).
struct BlockRange {
  int64_t begin;
  int64_t end;
};

/// Builds a Llama block by block: block 0 is the embedding, blocks 1 to num_layers are attention
/// and MLP, the last one is the head. Which weights there are, and what reads them, is decided
/// here.
class Llama {
 public:
  /// `seq_len` is the longest sequence a pass may have.
  Llama(const ModelConfig& config, int64_t seq_len, DType dtype, Probabilities probabilities);

  int64_t num_blocks() const { return config_.num_layers + 2; }
  /// Adds the block's parameters to the list.
  Block build(int64_t block, ParameterList& parameters) const;

  std::unique_ptr<Segment> embedding(ParameterList& parameters) const;
  std::unique_ptr<Segment> attention(int64_t layer, ParameterList& parameters) const;
  std::unique_ptr<Segment> mlp(int64_t layer, ParameterList& parameters) const;
  std::unique_ptr<Segment> head(ParameterList& parameters) const;

 private:
  ModelConfig config_;
  Probabilities probabilities_;
  RopeTable rope_;
};

/// A rank's part of a model: chunks of consecutive blocks, and their parameters.
class Model {
 public:
  /// What backward needs of one micro-batch in one chunk: a Saved for every block. Of a block that
  /// is recomputed it holds the input alone.
  using Activations = std::vector<Saved>;
  using BuildBlock = std::function<Block(int64_t block, ParameterList& parameters)>;

  /// The whole of a Llama as one chunk. Parameters are allocated and initialised on the current
  /// runtime's device.
  Model(const ModelConfig& config, int64_t seq_len, DType dtype, Probabilities probabilities,
        uint64_t seed, GradAccumulation accumulation = GradAccumulation::f32);
  /// The same; the parameters have no memory until it is given to them.
  Model(const ModelConfig& config, int64_t seq_len, DType dtype, Probabilities probabilities);
  /// The blocks in `chunks`. Their parameters have no memory until it is given to them.
  Model(const BuildBlock& build, const std::vector<BlockRange>& chunks);

  /// From here on forward keeps of these blocks their input alone, and backward runs each of them
  /// forward again. Full recomputation does so to all with attention and MLP.
  void recompute(BlockRange blocks) { recomputed_ = blocks; }

  /// Runs a micro-batch through one chunk: x [T, H] -> y [T, H], with which the next chunk begins.
  /// The chunk with the embedding reads no x; the one with the head adds to pass.loss and returns
  /// an undefined tensor. `activations` nullptr: there will be no backward pass.
  Tensor forward_chunk(int64_t chunk, Tensor x, Activations* activations, const Pass& pass);
  /// dy [T, H] -> dx [T, H], block by block from the last. Consumes the activations and hands every
  /// weight gradient to `grads`.
  Tensor backward_chunk(int64_t chunk, Tensor dy, Activations activations, Grads& grads,
                        const Pass& pass);

  // The same where the only chunk is the whole model.
  Activations forward(const Pass& pass);
  void backward(Activations activations, Grads& grads, const Pass& pass);
  void evaluate(const Pass& pass);
  /// [T, V], of every position; decoding, where one is drawn from, [B, V], of the last.
  Tensor logits(const Pass& pass);

  /// For a schedule that runs segment by segment, and for what adds segments of its own.
  std::vector<Block>& chunk(int64_t chunk) { return chunks_[chunk]; }

  ParameterList& parameters() { return parameters_; }

 private:
  struct BlockInput {
    Tensor x;  ///< [T, H]
  };

  bool recomputes(int64_t block) const;
  /// Fills what forward kept of the block's input alone.
  static void run_again(const Block& block, Saved& saved, Pass pass);

  ParameterList parameters_;
  std::vector<BlockRange> ranges_;  ///< of each chunk
  std::vector<std::vector<Block>> chunks_;
  BlockRange recomputed_{0, 0};
};

/// Floating-point operations that training on one token needs, as the book counts them: 6 per
/// weight of a matmul (a lookup is none), and 12 L h s for attention (h: the width of all query
/// heads) without regard to the causal mask.
double model_flops_per_token(const ModelConfig& config, int64_t seq_len);

}  // namespace usp
