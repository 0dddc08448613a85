#include "train/footprint.h"

#include <algorithm>

namespace usp {

namespace {

/// Output of the last segment that has one: what passes x on makes none.
NamedBytes output_of(const BlockFootprint& block) {
  NamedBytes output;
  for (const Footprint& segment : block.segments) {
    if (segment.output.bytes > 0) output = segment.output;
  }
  return output;
}

/// Adds to the part with the same block and name; the first of them decides the order.
void add(std::vector<LiveBytes>& parts, int64_t block, const NamedBytes& tensor) {
  if (tensor.bytes == 0) return;
  const auto found = std::ranges::find_if(parts, [&](const LiveBytes& part) {
    return part.block == block && part.name == tensor.name;
  });
  if (found == parts.end()) {
    parts.push_back({static_cast<int>(block), tensor.name, tensor.bytes});
  } else {
    found->bytes += tensor.bytes;
  }
}

}  // namespace

void Footprint::keep(const std::vector<NamedBytes>& part, const NamedBytes& output) {
  kept.insert(kept.end(), part.begin(), part.end());
  if (output.bytes > 0) kept.push_back(output);
}

std::vector<LiveBytes> kept_bytes(const std::vector<BlockFootprint>& blocks) {
  std::vector<LiveBytes> parts;
  for (const BlockFootprint& block : blocks) {
    if (block.recomputed) {
      add(parts, block.block, output_of(block));
      for (const Footprint& segment : block.segments) {
        for (const NamedBytes& tensor : segment.kept_through_recompute) {
          add(parts, block.block, tensor);
        }
      }
      continue;
    }
    for (const Footprint& segment : block.segments) {
      for (const NamedBytes& tensor : segment.kept) add(parts, block.block, tensor);
    }
    for (const Footprint& segment : block.segments) add(parts, block.block, segment.output);
  }
  return parts;
}

}  // namespace usp
