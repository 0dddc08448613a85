#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "config.h"
#include "layers.h"
#include "rank_view.h"
#include "tensor_parallel/linears.h"

namespace usp {

/// How a Llama is run.
struct LlamaOptions {
  int64_t seq_len;  ///< the longest sequence a pass may have
  DType dtype;
  Probabilities probabilities;
  // [options]
  RankView view = {};
  // [options]
};

/// Builds a Llama block by block: block 0 is the embedding, blocks 1 to num_layers are attention
/// and MLP, the last one is the head. Decides which weights there are and which layers read them.
class Llama {
 public:
  Llama(const ModelConfig& config, const LlamaOptions& options)
      : config_(config), options_(options), rope_(config, options.seq_len, options.dtype) {}

  int64_t num_blocks() const { return config_.num_layers + 2; }
  /// Adds the block's parameters to the list.
  Block build(int64_t block, ParameterList& parameters) const;

  /// The segment in block 0; like those below, it adds its parameters to the list.
  std::unique_ptr<Segment> embedding(ParameterList& parameters) const;
  /// The first half of a transformer layer; layers count from 0.
  std::unique_ptr<Segment> attention(int64_t layer, ParameterList& parameters) const;
  /// The second half.
  std::unique_ptr<Segment> mlp(int64_t layer, ParameterList& parameters) const;
  /// The segment in the last block.
  std::unique_ptr<Segment> head(ParameterList& parameters) const;
  // [table]
  /// The weight of both, where they are tied.
  Parameter& tied_table(ParameterList& parameters) const;
  // [table]

 private:
  ModelConfig config_;
  LlamaOptions options_;
  RopeTable rope_;
};

/// The blocks of a model that lie here, in chunks of consecutive ones, and their parameters.
class Model {
 public:
  /// What backward needs of one micro-batch in one chunk: a BlockSaved for every block. That of a
  /// recomputed block holds the block's input alone.
  using Activations = std::vector<BlockSaved>;
  /// Makes a block and adds its parameters to the list.
  using BuildBlock = std::function<Block(int64_t block, ParameterList& parameters)>;

  /// The blocks in `chunks`. Their parameters have no memory yet: see ParameterList::allocate().
  Model(const BuildBlock& build, const std::vector<BlockRange>& chunks);
  /// What lies here of a run's Llama, likewise without memory; recomputes what the run asks for.
  // [model]
  Model(const TrainConfig& config, const RankView& view);
  // [model]

  /// From here on forward keeps only the input of each of these blocks, and backward runs the block
  /// forward again. Full recomputation does so to all blocks with attention and MLP.
  void recompute(BlockRange blocks) { recomputed_ = blocks; }

  /// Runs a micro-batch through one chunk: x [T, H] -> y [T, H], with which the next chunk begins.
  /// The chunk with the embedding reads no x; the one with the head adds to pass.loss and returns
  /// an undefined tensor. `activations` nullptr: there will be no backward pass.
  Tensor forward_chunk(int64_t chunk, Tensor x, Activations* activations, const Pass& pass);
  /// dy [T, H] -> dx [T, H], block by block from the last. Consumes the activations and hands every
  /// weight gradient to `grads`.
  Tensor backward_chunk(int64_t chunk, Tensor dy, Activations activations, Grads& grads,
                        const Pass& pass);

  /// forward_chunk() where the only chunk is the whole model.
  Activations forward(const Pass& pass);
  /// backward_chunk(), likewise.
  void backward(Activations activations, Grads& grads, const Pass& pass);
  /// A forward pass for the loss alone, which adds to pass.loss.
  void evaluate(const Pass& pass) { forward_chunk(0, {}, nullptr, pass); }
  /// Logits [T, V] of every position; while decoding, [B, V] of each sample's last one. Where the
  /// head holds a shard of the vocabulary, its columns of them. Throws Error on a part of a model.
  Tensor logits(const Pass& pass);
  /// Logits that the chunk with the head makes of x [T, H]; undefined where it has the embedding.
  Tensor logits_of_chunk(int64_t chunk, Tensor x, const Pass& pass);

  /// For a schedule that runs segment by segment, and for whoever adds segments.
  std::vector<Block>& chunk(int64_t chunk) { return chunks_[chunk]; }
  /// Makes every block a chunk of its own.
  void part_blocks();
  /// What every segment of every chunk keeps.
  std::vector<BlockFootprint> footprints(const PassShape& shape) const;

  ParameterList& parameters() { return parameters_; }
  /// The blocks of each chunk.
  const std::vector<BlockRange>& ranges() const { return ranges_; }

 private:
  struct BlockInput {
    Tensor x;  ///< [T, H]
  };

  void build_chunks(const BuildBlock& build, const std::vector<BlockRange>& chunks);
  bool recomputes(int64_t block) const { return recomputed_.contains(block); }
  /// Exchanges the block's input in `saved` for all that backward needs.
  static void run_again(const Block& block, BlockSaved& saved, Pass pass);

  ParameterList parameters_;
  std::vector<BlockRange> ranges_;  ///< the blocks of each chunk
  std::vector<std::vector<Block>> chunks_;
  BlockRange recomputed_{0, 0};
};

}  // namespace usp
