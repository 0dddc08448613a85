#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "allocator.h"
#include "trace.h"

namespace usp {

/// Bytes alive of one kind of tensor in one block of the model.
struct LiveBytes {
  int block;              ///< -1: of none
  std::string_view name;  ///< of the tensors, as given where they are made; may be empty
  int64_t bytes;
};

/// "weights": 1, "gradients": 2, ...: a number for every category, as the inside of a JSON object.
std::string by_category(const std::function<int64_t(Category)>& bytes);

/// What the forward pass of the last recorded step left for backward: the activations alive when
/// its first "forward" phase ends, block by block in the order of their making. Empty if no step
/// was recorded by both the allocator and the tracer.
std::vector<LiveBytes> saved_activations(const Allocator& allocator, const Tracer& tracer);

/// The most that was alive at a time of each named tensor of a category, while the allocator
/// recorded; in the order in which they first appeared, and of no block.
std::vector<LiveBytes> peaks_by_name(const Allocator& allocator, Category category);

/// memory.json: peaks by category, what was reserved, the phases of the recorded steps as [begin
/// ns, end ns, name, step], what was alive when recording began, and every recorded allocation and
/// release as [ns, bytes, category, block, index in "names"].
std::string memory_json(const Allocator& allocator, const Tracer& tracer);

}  // namespace usp
