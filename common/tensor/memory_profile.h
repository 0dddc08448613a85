#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/allocator.h"
#include "tensor/trace.h"

namespace usp {

/// Bytes alive of one kind of tensor in one block of the model.
struct LiveBytes {
  int block;              ///< -1: of none
  std::string_view name;  ///< of the tensors, as given where they are made; may be empty
  int64_t bytes;
};

/// A number for every category, as the inside of a JSON object: "weights": 1, "gradients": 2, ...
std::string by_category(const std::function<int64_t(Category)>& bytes);

/// What the forward pass of the last recorded step left for backward: the activations alive when
/// its first "forward" phase ends, block by block in the order in which they were made. Empty
/// unless both the allocator and the tracer recorded a step.
std::vector<LiveBytes> saved_activations(const Allocator& allocator, const Tracer& tracer);

/// For every name of a category's tensors, the most bytes that were live at any time while the
/// allocator recorded. The names stand in the order in which they first appeared; no entry has a
/// block.
std::vector<LiveBytes> peaks_by_name(const Allocator& allocator, Category category);

/// The text of memory.json. It holds the peaks by category, the reserved bytes and what was live
/// when recording began; the phases of the recorded steps as [begin ns, end ns, name, step]; and
/// every recorded allocation and release as [ns, bytes, category, block, index in "names"]. Times
/// are the host's: where an accelerator works, those of queueing the work.
std::string memory_json(const Allocator& allocator, const Tracer& tracer);

}  // namespace usp
