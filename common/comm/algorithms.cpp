#include "comm/algorithms.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/reduce.h"

namespace usp::algorithms {

namespace {

Elements part(const Elements& elements, Slice slice) {
  return {elements.at(slice.begin), slice.count, elements.dtype};
}

Message message(int peer, const Elements& elements, Slice slice) {
  return {peer, elements.at(slice.begin), slice.count * bytes_of(elements.dtype)};
}

/// The other ranks, beginning with the next one, so that not all of them call on rank 0 first.
std::vector<int> others(const Group& group) {
  std::vector<int> ranks;
  for (int i = 1; i < group.size(); ++i) ranks.push_back((group.rank + i) % group.size());
  return ranks;
}

/// How every slice of a message is cut: into `count` pieces of so many elements, the last of fewer.
/// The same for all ranks, whose slices may differ by an element.
struct Pieces {
  int64_t elements, count;

  Pieces(int ranks, int64_t numel, DType dtype, int64_t limit) {
    const int64_t longest = slice(numel, ranks, 0).count;
    const int64_t of_an_element = (ranks - 1) * bytes_of(dtype);  // an element of every other rank
    elements = longest * of_an_element <= limit ? longest
                                                : std::max<int64_t>(1, limit / 2 / of_an_element);
    count = elements == longest ? 1 : (longest + elements - 1) / elements;
  }

  Slice of(Slice whole, int64_t piece) const {
    const int64_t begin = std::min(piece * elements, whole.count);
    return {whole.begin + begin, std::min(elements, whole.count - begin)};
  }
};

// [reduce_to_owners]
/// Contributions to every rank's slice of `input` go to that rank; this rank's sum goes to
/// `output`. A stage for each piece; the scratch has room for this one and the next.
std::vector<Stage> reduce_to_owners(const Group& group, const Elements& output, Slice at_output,
                                    const Elements& input, const Elements& scratch, ReduceOp op,
                                    int64_t limit) {
  const int n = group.size(), rank = group.rank;
  const DType dtype = input.dtype;
  const Pieces pieces(n, input.numel, dtype, limit);
  std::vector<Stage> stages(pieces.count);
  for (int64_t p = 0; p < pieces.count; ++p) {
    const Slice own = pieces.of(slice(input.numel, n, rank), p);
    std::vector<const void*> parts(n);
    parts[rank] = input.at(own.begin);
    stages[p].input.push_back(part(input, own));
    char* room = static_cast<char*>(scratch.data);
    if (room != nullptr) room += p % 2 * (n - 1) * pieces.elements * bytes_of(dtype);
    for (int peer : others(group)) {
      const Slice theirs = pieces.of(slice(input.numel, n, peer), p);
      stages[p].sends.push_back(message(peer, input, theirs));
      stages[p].input.push_back(part(input, theirs));
      stages[p].receives.push_back({peer, room, own.count * bytes_of(dtype)});
      parts[peer] = room;
      if (room != nullptr) room += own.count * bytes_of(dtype);
    }
    void* to = output.at(at_output.begin + p * pieces.elements);
    stages[p].finish = [to, parts, own, dtype, op] {
      reduce_in_order(to, parts, own.count, dtype, op);
    };
    stages[p].early = p > 0;
  }
  return stages;
}
// [reduce_to_owners]

}  // namespace

Slice slice(int64_t numel, int parts, int index) {
  const int64_t base = numel / parts, rest = numel % parts;
  return {index * base + std::min<int64_t>(index, rest), base + (index < rest ? 1 : 0)};
}

int64_t reduction_scratch(int ranks, int rank, int64_t numel, DType dtype, int64_t limit) {
  const Pieces pieces(ranks, numel, dtype, limit);
  const int64_t elements =
      pieces.count == 1 ? slice(numel, ranks, rank).count : 2 * pieces.elements;
  return (ranks - 1) * elements * bytes_of(dtype);
}

// [all_reduce]
std::vector<Stage> all_reduce(const Group& group, const Elements& tensor, const Elements& scratch,
                              ReduceOp op, int64_t limit) {
  const int n = group.size();
  const Pieces pieces(n, tensor.numel, tensor.dtype, limit);
  const Slice own = slice(tensor.numel, n, group.rank);
  std::vector<Stage> stages = reduce_to_owners(group, tensor, own, tensor, scratch, op, limit);
  stages.emplace_back();
  for (int64_t p = 0; p < pieces.count; ++p) {
    // The next stage may begin before this piece is summed: the sums go with the one behind it.
    Stage& gather = stages[std::min(p + 2, pieces.count)];
    for (int peer : others(group)) {
      const Slice theirs = pieces.of(slice(tensor.numel, n, peer), p);
      gather.sends.push_back(message(peer, tensor, pieces.of(own, p)));
      gather.receives.push_back(message(peer, tensor, theirs));
    }
    for (int rank = 0; rank < n; ++rank) {
      gather.output.push_back(part(tensor, pieces.of(slice(tensor.numel, n, rank), p)));
    }
  }
  return stages;
}
// [all_reduce]

std::vector<Stage> reduce_scatter(const Group& group, const Elements& output, const Elements& input,
                                  const Elements& scratch, ReduceOp op, int64_t limit) {
  const Pieces pieces(group.size(), input.numel, input.dtype, limit);
  const Slice own{0, output.numel};
  std::vector<Stage> stages = reduce_to_owners(group, output, own, input, scratch, op, limit);
  for (int64_t p = 0; p < pieces.count; ++p) {
    stages[p].output = {part(output, pieces.of(own, p))};
  }
  return stages;
}

std::vector<Stage> all_gather(const Group& group, const Elements& output, const Elements& input,
                              bool in_place) {
  const int64_t count = input.numel;
  Stage stage;
  stage.input = {input};
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank && in_place) continue;
    stage.output.push_back(part(output, {rank * count, count}));
  }
  for (int peer : others(group)) {
    stage.sends.push_back(message(peer, input, {0, count}));
    stage.receives.push_back(message(peer, output, {peer * count, count}));
  }
  void* to = output.at(group.rank * count);
  if (to != input.data) {
    stage.finish = [to, from = input.data, bytes = input.bytes()] {
      if (bytes > 0) std::memcpy(to, from, bytes);
    };
  }
  return {std::move(stage)};
}

std::vector<Stage> broadcast(const Group& group, const Elements& tensor, int root) {
  const Slice all{0, tensor.numel};
  Stage stage;
  if (group.rank != root) {
    stage.receives.push_back(message(root, tensor, all));
    stage.output = {tensor};
  } else {
    for (int peer : others(group)) stage.sends.push_back(message(peer, tensor, all));
    stage.input = {tensor};
  }
  return {std::move(stage)};
}

std::vector<Stage> all_to_all(const Group& group, const Elements& output, const Elements& input,
                              std::span<const int64_t> output_counts,
                              std::span<const int64_t> input_counts) {
  const int n = group.size(), rank = group.rank;
  std::vector<Slice> from(n), to(n);
  int64_t input_at = 0, output_at = 0;
  for (int r = 0; r < n; ++r) {
    from[r] = {input_at, input_counts[r]};
    to[r] = {output_at, output_counts[r]};
    input_at += input_counts[r];
    output_at += output_counts[r];
  }
  Stage stage;
  stage.input = {input};
  stage.output = {output};
  for (int peer : others(group)) {
    stage.sends.push_back(message(peer, input, from[peer]));
    stage.receives.push_back(message(peer, output, to[peer]));
  }
  stage.finish = [to = output.at(to[rank].begin), from = input.at(from[rank].begin),
                  bytes = from[rank].count * bytes_of(input.dtype)] {
    if (bytes > 0) std::memcpy(to, from, bytes);
  };
  return {std::move(stage)};
}

std::vector<Stage> barrier(const Group& group) {
  Stage stage;
  for (int peer : others(group)) {
    stage.sends.push_back({peer, nullptr, 0});
    stage.receives.push_back({peer, nullptr, 0});
  }
  return {std::move(stage)};
}

std::vector<Stage> stages(const Operation& operation, const Elements& input, const Elements& output,
                          const Elements& scratch, int64_t limit) {
  const Group& group = *operation.group;
  const Operation::Memory& memory = operation.memory;
  Stage stage;
  switch (operation.kind) {
    case CommKind::all_reduce:
      return all_reduce(group, output, scratch, operation.reduce, limit);
    case CommKind::reduce_scatter:
      return reduce_scatter(group, output, input, scratch, operation.reduce, limit);
    case CommKind::all_gather:
      return all_gather(
          group, output, input,
          memory.input.address() == Elements(memory.output).at(group.rank * memory.input.numel()));
    case CommKind::broadcast:
      return broadcast(group, group.rank == operation.root ? input : output, operation.root);
    case CommKind::all_to_all:
      return all_to_all(group, output, input, operation.output_counts, operation.input_counts);
    case CommKind::send:
      stage.sends.push_back(message(operation.peer, input, {0, input.numel}));
      stage.input = {input};
      return {std::move(stage)};
    case CommKind::recv:
      stage.receives.push_back(message(operation.peer, output, {0, output.numel}));
      stage.output = {output};
      return {std::move(stage)};
    case CommKind::barrier:
      return barrier(group);
  }
  return {};
}

Sends sends_of(const std::vector<Stage>& stages, const Group& group, int64_t node_size) {
  const int64_t node = group.node_of(group.rank, node_size);
  Sends sends;
  for (const Stage& stage : stages) {
    for (const Message& message : stage.sends) {
      ++sends.messages;
      sends.wire_bytes += message.bytes;
      if (group.node_of(message.peer, node_size) != node) sends.net_bytes += message.bytes;
    }
  }
  return sends;
}

// [closed_form]
namespace {

/// Ranks [first, last) of the group lie in this rank's node: members ascend.
struct OwnNode {
  int first, last;

  OwnNode(const Group& group, int64_t node_size) : first(0), last(group.size()) {
    if (node_size == 0) return;
    const int64_t begin = group.node_of(group.rank, node_size) * node_size;
    const auto rank_of = [&](int64_t world_rank) {
      return static_cast<int>(std::ranges::lower_bound(group.members, world_rank) -
                              group.members.begin());
    };
    first = rank_of(begin);
    last = rank_of(begin + node_size);
  }
  bool contains(int rank) const { return rank >= first && rank < last; }
  int size() const { return last - first; }
};

}  // namespace

Sends sends_of(const Operation& operation, int64_t numel, int64_t limit, int64_t node_size) {
  const Group& group = *operation.group;
  const int64_t n = group.size(), element = bytes_of(operation.dtype);
  const OwnNode node(group, node_size);
  // One message of this many elements to every other rank.
  const auto to_each = [&](int64_t elements) {
    return Sends{n - 1, (n - 1) * elements * element, (n - node.size()) * elements * element};
  };
  // To every other rank its slice, in this many pieces.
  const auto slices = [&](int64_t pieces) {
    const int64_t own = slice(numel, n, group.rank).count;
    const int64_t in_node = slice(numel, n, node.last).begin - slice(numel, n, node.first).begin;
    return Sends{pieces * (n - 1), (numel - own) * element, (numel - in_node) * element};
  };
  const auto pieces = [&] { return Pieces(n, numel, operation.dtype, limit).count; };
  switch (operation.kind) {
    case CommKind::all_reduce: {
      Sends sends = slices(pieces());
      const Sends sums = to_each(slice(numel, n, group.rank).count);
      sends.messages *= 2;
      sends.wire_bytes += sums.wire_bytes;
      sends.net_bytes += sums.net_bytes;
      return sends;
    }
    case CommKind::reduce_scatter:
      return slices(pieces());
    case CommKind::all_gather:
      return to_each(numel);
    case CommKind::broadcast:
      return group.rank == operation.root ? to_each(numel) : Sends{};
    case CommKind::all_to_all: {
      const auto counts = operation.input_counts.begin();
      const int64_t in_node = std::accumulate(counts + node.first, counts + node.last, int64_t{0});
      return {n - 1, (numel - counts[group.rank]) * element, (numel - in_node) * element};
    }
    case CommKind::send:
      return {1, numel * element, node.contains(operation.peer) ? 0 : numel * element};
    case CommKind::recv:
      return {};
    case CommKind::barrier:
      return to_each(0);
  }
  return {};
}
// [closed_form]

}  // namespace usp::algorithms
