#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "train/footprint.h"
#include "train/grads.h"
#include "train/pass.h"
#include "train/saved.h"

namespace usp {

/// A piece of the model that a schedule runs as a unit: the attention half of a block, its MLP, the
/// embedding, the head. The segments of a block share one BlockSaved for each micro-batch. x and dy
/// run along the residual stream; whatever else a segment hands to the next one lies in BlockSaved.
class Segment {
 public:
  virtual ~Segment() = default;
  virtual std::string_view name() const = 0;  ///< in traces; a string literal
  /// x [T, H] -> y [T, H]; fills `saved`.
  virtual Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) = 0;
  /// dy [T, H] -> dx [T, H]; hands weight gradients to `grads`. Takes out of `saved` what this
  /// segment's forward put there.
  virtual Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) = 0;
  /// The block will be recomputed: takes out of `saved` what shall not be made again, and keeps it
  /// in `kept`, where forward finds it.
  virtual void keep_through_recompute(BlockSaved& /*saved*/, BlockSaved& /*kept*/) const {}
  /// The activations that forward and backward make. A segment that makes none need not say so.
  virtual Footprint footprint(const PassShape&) const { return {}; }
};

/// The segments that a pipeline stage or a recomputation treats as one.
using Block = std::vector<std::unique_ptr<Segment>>;

/// Consecutive blocks: [begin, end).
struct BlockRange {
  int64_t begin;
  int64_t end;

  bool contains(int64_t block) const { return begin <= block && block < end; }
};

/// Footprint of each of the block's segments.
inline std::vector<Footprint> footprints_of(const Block& block, const PassShape& shape) {
  std::vector<Footprint> footprints;
  for (const auto& segment : block) footprints.push_back(segment->footprint(shape));
  return footprints;
}

}  // namespace usp
