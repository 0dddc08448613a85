#include "train/fold.h"

#include <algorithm>

#include "tensor/runtime.h"

namespace usp {

PassBytes pass_bytes(const std::vector<PassBytes>& blocks) {
  PassBytes all;
  for (const PassBytes& block : blocks) {
    all.forward_peak = std::max(all.forward_peak, all.kept + block.forward_peak);
    all.kept += block.kept;
  }
  // Going back, what a block kept makes way for what its weights' gradients wait with.
  int64_t before = all.kept;
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    before -= block->kept;
    all.backward_peak = std::max(all.backward_peak, before + block->backward_peak);
    all.split_peak = std::max(all.split_peak, before + all.held + block->split_peak);
    all.held += block->held;
    all.written.insert(all.written.end(), block->written.begin(), block->written.end());
  }
  return all;
}

std::vector<PassBytes> by_chunk(const std::vector<PassBytes>& blocks,
                                const std::vector<BlockRange>& chunks) {
  std::vector<PassBytes> of_chunks;
  auto next = blocks.begin();
  for (const BlockRange& chunk : chunks) {
    const auto end = next + (chunk.end - chunk.begin);
    of_chunks.push_back(pass_bytes({next, end}));
    next = end;
  }
  return of_chunks;
}

PassBytes fold(const FoldedBlock& block, const std::function<Tensor()>& make_x, Grads& grads) {
  Allocator& allocator = Runtime::current().allocator();
  PassBytes bytes;
  for (const bool split : {false, true}) {
    Grads::Deferred waiting;
    Tensor x = make_x();
    const int64_t before = allocator.live_bytes(Category::activations);
    const auto live = [&] { return allocator.live_bytes(Category::activations) - before; };
    const auto peak = [&] { return allocator.peak_bytes(Category::activations) - before; };
    allocator.reset_peaks();
    Tensor y = block.forward(std::move(x));
    bytes.forward_peak = peak();
    bytes.kept = live();
    allocator.reset_peaks();
    grads.defer_to(split ? &waiting : nullptr);
    const Tensor dx = block.backward(std::move(y));  // in whose place dy is
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

}  // namespace usp
