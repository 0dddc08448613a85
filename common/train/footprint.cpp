#include "train/footprint.h"

#include <numeric>
#include <utility>

namespace usp {

namespace {

int64_t sum_of(const std::vector<NamedBytes>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const NamedBytes& tensor) { return sum + tensor.bytes; });
}

/// Of the last segment that has one: what passes x on makes none.
NamedBytes output_of(const BlockFootprint& block) {
  NamedBytes output;
  for (const Footprint& segment : block.segments) {
    if (segment.output.bytes > 0) output = segment.output;
  }
  return output;
}

int64_t kept_through_recompute(const BlockFootprint& block) {
  int64_t bytes = 0;
  for (const Footprint& segment : block.segments) bytes += sum_of(segment.kept_through_recompute);
  return bytes;
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

int64_t peak_bytes(const std::vector<BlockFootprint>& blocks) {
  const PassBytes bytes = pass_bytes(blocks);
  return std::max(bytes.forward_peak, bytes.backward_peak);
}

PassBytes pass_bytes(const std::vector<BlockFootprint>& blocks) {
  PassBytes result;
  int64_t live = 0, peak = 0;
  int64_t handed = 0;  // of `live`, what the next segment takes over
  const auto forward = [&](const BlockFootprint& block, bool again) {
    for (const Footprint& segment : block.segments) {
      live += sum_of(segment.kept);
      peak = std::max(peak, live + segment.forward_peak - (again ? segment.unread : 0));
      live += segment.output.bytes + segment.handed - handed;
      handed = segment.handed;
    }
  };
  for (const BlockFootprint& block : blocks) {
    const int64_t before = live;
    forward(block, /*again=*/false);
    if (block.recomputed) live = before + output_of(block).bytes + kept_through_recompute(block);
  }
  result.forward_peak = std::exchange(peak, 0);
  result.kept = live;
  for (const bool split : {false, true}) {
    live = result.kept;
    peak = 0;
    // Going back, each output has been let go of by the segment that kept it, and in its place,
    // with as many bytes, there is its gradient.
    for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
      if (block->recomputed) {
        live -= kept_through_recompute(*block);  // forward counts them
        forward(*block, /*again=*/true);
        live -= output_of(*block).bytes;  // nobody needs it again
      }
      for (auto segment = block->segments.rbegin(); segment != block->segments.rend(); ++segment) {
        const int64_t most = std::max(segment->backward_peak, split ? segment->split_peak : 0);
        peak = std::max(peak, live + segment->recomputed + most);
        live -= sum_of(segment->kept) + segment->output.bytes;
        live += segment->handed_back - handed;
        handed = segment->handed_back;
        if (split) live += segment->held;
      }
    }
    (split ? result.split_peak : result.backward_peak) = peak;
    if (split) result.held = live;
  }
  return result;
}

}  // namespace usp
