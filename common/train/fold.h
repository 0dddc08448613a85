#pragma once

#include <algorithm>
#include <map>

#include "tensor/runtime.h"
#include "train/segment.h"

namespace usp {

/// What one micro-batch asks of memory on its way through consecutive blocks, besides the x that
/// the first of them reads.
struct PassBytes {
  int64_t forward_peak = 0;
  int64_t kept = 0;           ///< between forward and backward, with the last block's output
  int64_t backward_peak = 0;  ///< with what is kept, and dy in the place of the output
  int64_t split_peak = 0;     ///< the same where the gradients of weights wait
  int64_t held = 0;           ///< for them, from then on; dx is in the place of x
  /// Parameters, by index in their list, in the order in which backward writes their gradients.
  std::vector<int64_t> written = {};
};

/// The same of each chunk that some of these blocks, in their order, make up.
inline std::vector<PassBytes> by_chunk(const std::vector<PassBytes>& blocks,
                                       const std::vector<BlockRange>& chunks) {
  std::vector<PassBytes> of_chunks;
  auto block = blocks.begin();
  for (const BlockRange& chunk : chunks) {
    PassBytes& all = of_chunks.emplace_back();
    for (const auto end = block + (chunk.end - chunk.begin); block != end; ++block) {
      all.forward_peak = std::max(all.forward_peak, all.kept + block->forward_peak);
      all.backward_peak = std::max(all.backward_peak, all.kept + block->backward_peak);
      // Backward comes to the blocks before this one when its gradients wait already.
      all.split_peak = std::max(all.split_peak + block->held, all.kept + block->split_peak);
      all.kept += block->kept;
      all.held += block->held;
      all.written.insert(all.written.begin(), block->written.begin(), block->written.end());
    }
  }
  return of_chunks;
}

/// Runs block `b` of a model on meta forward and backward, as a step does, and reads the allocator:
/// once as usual, and once with the gradients of weights put off. Each run counts in the window of
/// `grads`. of_x: without axes for the embedding, which reads no x.
template <class Model>
PassBytes fold(Model& model, size_t b, Shape of_x, DType dtype, const Pass& pass, Grads& grads) {
  Allocator& allocator = Runtime::current().allocator();
  PassBytes bytes;
  for (const bool split : {false, true}) {
    Grads::Deferred waiting;
    typename Model::Activations saved;
    Tensor x = of_x.rank() == 0 ? Tensor() : Tensor::empty(of_x, dtype);
    const int64_t before = allocator.live_bytes(Category::activations);
    const auto live = [&] { return allocator.live_bytes(Category::activations) - before; };
    const auto peak = [&] { return allocator.peak_bytes(Category::activations) - before; };
    allocator.reset_peaks();
    Tensor y = model.forward_chunk(b, std::move(x), &saved, pass);
    bytes.forward_peak = peak();
    bytes.kept = live();
    allocator.reset_peaks();
    grads.defer_to(split ? &waiting : nullptr);
    // In the place of y is dy.
    const Tensor dx = model.backward_chunk(b, std::move(y), std::move(saved), grads, pass);
    grads.defer_to(nullptr);
    (split ? bytes.split_peak : bytes.backward_peak) = peak();
    for (const Grads::Contribution& one : waiting) {
      for (const Parameter* parameter : one.parameters) bytes.written.push_back(parameter->index);
    }
    if (split) bytes.held = live();
    grads.run(waiting);
  }
  return bytes;
}

/// The same of each block of a model whose chunks are single blocks. Blocks that keep the same are
/// of a kind, and one of each kind is run.
template <class Model>
std::vector<PassBytes> fold_blocks(Model& model, const PassShape& shape, int64_t hidden_size,
                                   const Pass& pass) {
  Grads grads(model.parameters());
  grads.begin_window(2);  // fold() runs a block twice
  const std::vector<BlockFootprint> blocks = model.footprints(shape);
  std::map<int64_t, int64_t> begin;  // of each block's parameters in their list
  for (size_t i = model.parameters().size(); i-- > 0;) begin[model.parameters()[i].block] = i;
  std::vector<PassBytes> folded;
  for (size_t b = 0; b < blocks.size(); ++b) {
    size_t same = 0;
    while (!blocks[same].is_like(blocks[b])) ++same;
    const Shape of_x = blocks[b].block == 0 ? Shape{} : Shape{shape.rows(), hidden_size};
    folded.push_back(same < b ? folded[same] : fold(model, b, of_x, shape.dtype, pass, grads));
    const int64_t further = begin[blocks[b].block] - begin[blocks[same].block];
    for (int64_t& parameter : folded.back().written) parameter += further;
  }
  return folded;
}

}  // namespace usp
