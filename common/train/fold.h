#pragma once

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "train/footprint.h"
#include "train/grads.h"
#include "train/pass.h"
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
/// The same of blocks in a row, from that of each.
PassBytes pass_bytes(const std::vector<PassBytes>& blocks);
/// The same of each chunk that some of these blocks, in their order, make up.
std::vector<PassBytes> by_chunk(const std::vector<PassBytes>& blocks,
                                const std::vector<BlockRange>& chunks);

/// How fold() runs a block: as a step does, with whatever a step keeps of it.
struct FoldedBlock {
  std::function<Tensor(Tensor x)> forward;    ///< -> y
  std::function<Tensor(Tensor dy)> backward;  ///< -> dx
};

/// Runs the block on the current runtime, which is of meta, and reads the allocator: once as usual,
/// and once with the gradients of weights put off, each of which counts in the window of `grads`.
PassBytes fold(const FoldedBlock& block, const std::function<Tensor()>& make_x, Grads& grads);

/// The same of each block of a model on meta whose chunks are single blocks. Blocks that keep the
/// same are of a kind, and one of each kind is run.
template <class Model>
std::vector<PassBytes> fold_blocks(Model& model, const PassShape& shape, int64_t hidden_size,
                                   const Pass& pass) {
  Grads grads(model.parameters());
  grads.begin_window(2);  // fold() runs a block twice
  const std::vector<BlockFootprint> blocks = model.footprints(shape);
  std::map<int64_t, int64_t> begin;  // of each block's parameters in their list
  for (size_t i = model.parameters().size(); i-- > 0;) {
    begin[model.parameters()[i].block] = static_cast<int64_t>(i);
  }
  std::vector<PassBytes> folded;
  for (size_t b = 0; b < blocks.size(); ++b) {
    size_t same = 0;
    while (!blocks[same].is_like(blocks[b])) ++same;
    typename Model::Activations kept;
    const FoldedBlock block = {
        [&](Tensor x) { return model.forward_chunk(b, std::move(x), &kept, pass); },
        [&](Tensor dy) {
          return model.backward_chunk(b, std::move(dy), std::exchange(kept, {}), grads, pass);
        }};
    const auto make_x = [&] {  // which the embedding does not read
      return blocks[b].block == 0 ? Tensor()
                                  : Tensor::empty({shape.rows(), hidden_size}, shape.dtype);
    };
    folded.push_back(same < b ? folded[same] : fold(block, make_x, grads));
    const int64_t further = begin[blocks[b].block] - begin[blocks[same].block];
    for (int64_t& parameter : folded.back().written) parameter += further;
  }
  return folded;
}

}  // namespace usp
