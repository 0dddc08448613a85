#pragma once

#include <span>
#include <vector>

#include "comm/operation.h"

/// The collectives as messages between pairs of ranks. Each function returns the stages of one
/// rank; `n` is the size of the group.
///
/// A reduction gives every rank a slice to sum. All contributions to a slice go straight to its
/// owner, which adds them in the order of the ranks: the bytes of a ring, another order of sums
/// than a ring's, and the same one wherever the slices begin.
///
/// Contributions wait in scratch memory to be added. Where those to a whole slice need more than
/// `limit` bytes, the slice is reduced in pieces: one is added while the next one arrives. The sums
/// of a piece leave for the other ranks while later pieces are still to be added.
namespace usp::algorithms {

/// Elements [begin, begin + count) of a tensor cut into `parts` parts as equal as possible.
struct Slice {
  int64_t begin, count;
};
/// Part `index` of them.
Slice slice(int64_t numel, int parts, int index);

/// `scratch` holds at least reduction_scratch() bytes.
std::vector<Stage> all_reduce(const Group& group, const Elements& tensor, const Elements& scratch,
                              ReduceOp op, int64_t limit);
/// The same, of which a rank gets its own slice alone.
std::vector<Stage> reduce_scatter(const Group& group, const Elements& output, const Elements& input,
                                  const Elements& scratch, ReduceOp op, int64_t limit);
/// Bytes of scratch for the other ranks' contributions to what `rank` of `ranks` sums, of a message
/// of this many elements. At most `limit`, or two elements of each rank.
int64_t reduction_scratch(int ranks, int rank, int64_t numel, DType dtype, int64_t limit);

/// Every rank sends its input to every other one. In place, its own part of the output is the
/// input, and stays as it is.
std::vector<Stage> all_gather(const Group& group, const Elements& output, const Elements& input,
                              bool in_place);
/// The root sends to every other rank, itself.
std::vector<Stage> broadcast(const Group& group, const Elements& tensor, int root);
/// Counts are elements, by rank of the group.
std::vector<Stage> all_to_all(const Group& group, const Elements& output, const Elements& input,
                              std::span<const int64_t> output_counts,
                              std::span<const int64_t> input_counts);
/// An empty message from every rank to every other one.
std::vector<Stage> barrier(const Group& group);

/// Stages of any operation. `input` and `output` are its tensors or copies of these in other
/// memory, `scratch` is for a reduction.
std::vector<Stage> stages(const Operation& operation, const Elements& input, const Elements& output,
                          const Elements& scratch, int64_t limit);

/// What the rank sends in these stages, message by message.
Sends sends_of(const std::vector<Stage>& stages, const Group& group, int64_t node_size);
/// The same of stages(operation, input, ...) without making any: the work does not grow with the
/// group. `numel` is the size of the input, or of the tensor that an operation has alone.
Sends sends_of(const Operation& operation, int64_t numel, int64_t limit, int64_t node_size);

}  // namespace usp::algorithms
