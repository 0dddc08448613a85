#include "accounting/zero_walk.h"

#include <algorithm>

#include "accounting/pipeline_accountant.h"
#include "accounting/zero_accountant.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

template <class T>
bool contains(const std::vector<T>& some, const T& one) {
  return std::ranges::find(some, one) != some.end();
}

}  // namespace

ZeroShapes::ZeroShapes(const TrainConfig& config, DryRank& dry)
    : rank(dry), chunks(dry.model.ranges()) {
  for (const Unit& unit : cut_into_units(dry.model.parameters())) {
    const std::string& group = unit.parameters.front()->grad_groups.front();
    const Communicator& all = dry.mesh().group(group);
    const int64_t copies = all.size(), Z = shard_size(config, copies);
    UnitShape& shape = units.emplace_back(
        UnitShape{(unit.numel + Z - 1) / Z * Z, unit.numel, {}, group, copies, Z, all.rank()});
    for (const Parameter* parameter : unit.parameters) {
      for (int64_t block : parameter->readers) {
        if (!contains(shape.blocks, block)) shape.blocks.push_back(block);
      }
      parameters.push_back({group, parameter->local_shape().numel()});
      held += parameters.back().numel;
    }
  }
  std::vector<std::string> groups;
  for (const GradientShape& gradient : parameters) groups.push_back(gradient.group);
  std::ranges::stable_sort(parameters, {}, [&](const GradientShape& gradient) {
    return std::ranges::find(groups, gradient.group) - groups.begin();
  });
}

int64_t ZeroShapes::shards() const {
  int64_t numel = 0;
  for (const UnitShape& unit : units) numel += unit.shard();
  return numel;
}

int64_t ZeroShapes::updated() const {
  int64_t numel = 0;
  for (const UnitShape& unit : units) numel += unit.updated_by(unit.rank);
  return numel;
}

int64_t ZeroShapes::all() const {
  int64_t numel = 0;
  for (const UnitShape& unit : units) numel += unit.numel;
  return numel;
}

void ZeroWalk::Scratch::add(int64_t needed) {
  if (needed > largest) bytes += largest = needed;
}

ZeroWalk::ZeroWalk(const TrainConfig& config, const ZeroShapes& shapes)
    : config_(config), shapes_(shapes), kept_(kKept[config.data_parallel.zero_stage]) {
  // [passes]
  const std::vector<ChunkPass> passes = passes_of_schedule(config, shapes.rank.stage_rank());
  // [passes]
  const int64_t micro_batches = std::ranges::count_if(
      passes, [](const ChunkPass& pass) { return pass.gradients && pass.chunk == 0; });
  rounds_ = rounds_of_step(config.data_parallel, micro_batches);
  in_round_ = micro_batches / rounds_;
  whole_.resize(shapes.units.size());
  contributions_.resize(shapes.units.size());
  rounds_done_.resize(shapes.units.size());
  read_by_.resize(config.model.num_layers + 2);
  for (size_t unit = 0; unit < shapes.units.size(); ++unit) {
    for (int64_t block : shapes.units[unit].blocks) read_by_[block].push_back(unit);
  }
  for (const ChunkPass& pass : passes) run(pass);
  complete();
  if (kept_.weights == Kept::shard) return;
  gathered = shapes.all();  // once, after the update
  for (const UnitShape& unit : shapes.units) sent_to_gather += unit.sent();
}

// [run]
void ZeroWalk::run(const ChunkPass& pass) {
  const auto [begin, end] = shapes_.chunks[pass.chunk];
  const std::string& after = config_.data_parallel.reshard_after;
  std::vector<bool> stays(whole_.size(), after == "step");
  for (int64_t block = begin; after == "chunk" && block < end; ++block) {
    for (size_t unit : read_by_[block]) stays[unit] = true;
  }
  const auto in_chunk = [&](int64_t block) {
    return block >= begin && block < end ? read_by_[block] : Units();
  };
  // The backward of a lookup reads no weight.
  const auto in_backward = [&](int64_t block) { return block == 0 ? Units() : in_chunk(block); };
  for (int64_t block = begin; pass.forward && block < end; ++block) {
    enter(in_chunk(block), block + 1 < end ? in_chunk(block + 1) : in_backward(block - 1), stays);
  }
  for (int64_t block = end - 1; pass.backward && block >= begin; --block) {
    enter(in_backward(block), in_backward(block - 1), stays);
  }
  if (pass.backward) enter({}, {}, stays);
  if (pass.gradients) add_gradients(pass.chunk);
}
// [run]

void ZeroWalk::enter(const Units& units, const Units& next, const std::vector<bool>& stays) {
  if (kept_.weights == Kept::whole) return;
  for (size_t unit = 0; unit < whole_.size(); ++unit) {
    if (!whole_[unit] || stays[unit] || contains(units, unit) || contains(next, unit)) continue;
    whole_[unit] = false;
    live_ -= shapes_.units[unit].numel;
  }
  for (size_t unit : units) gather(unit);
  for (size_t unit : next) gather(unit);
}

void ZeroWalk::gather(size_t unit) {
  if (whole_[unit]) return;
  whole_[unit] = true;
  gathered += shapes_.units[unit].numel;
  sent_to_gather += shapes_.units[unit].sent();
  most_gathered = std::max(most_gathered, live_ += shapes_.units[unit].numel);
}

// [gradients]
void ZeroWalk::add_gradients(int64_t chunk) {
  const auto [begin, end] = shapes_.chunks[chunk];
  for (int64_t block = end; block-- > begin;) {
    Units units = read_by_[block];
    // The head begins with its table: another block's, or the last that it has added.
    std::ranges::reverse(units);
    std::ranges::stable_partition(
        units, [&](size_t unit) { return shapes_.units[unit].blocks.front() != block; });
    if (add_mixture(block, units)) continue;
    for (size_t unit : units) contribute(unit);
  }
}

void ZeroWalk::contribute(size_t unit) {
  const int64_t expected = std::ssize(shapes_.units[unit].blocks) * in_round_;
  if (contributions_[unit] % expected == 0) begin(unit);
  if (++contributions_[unit] % expected == 0) reduce(unit);
}
// [gradients]

void ZeroWalk::begin(size_t unit) {
  if (contains(reducing_, unit)) complete();
  if (kept_.gradients == Kept::whole) return;
  most_written = std::max(most_written, written_ += shapes_.units[unit].numel);
  most_written_unpadded =
      std::max(most_written_unpadded, written_unpadded_ += shapes_.units[unit].held);
}

void ZeroWalk::reduce(size_t unit) {
  const UnitShape& shape = shapes_.units[unit];
  const int64_t numel = shape.numel, Z = shape.ranks, R = shape.copies / Z;
  const DType dtype = dtype_of_reduction(config_);
  if (kept_.gradients == Kept::shard || R > 1) complete();
  const bool adds = rounds_done_[unit] > 0 || dtype != dtype_of_gradient_sum(config_);
  if (kept_.gradients == Kept::shard && adds) most_added = std::max(most_added, numel / Z);
  reduced += numel;
  sent_to_reduce += shape.sent();
  shards_[shape.group].add(device_scratch(config_.engine(), Z, /*rank=*/0, numel, dtype));
  count_scratch();
  reducing_.push_back(unit);
}

void ZeroWalk::complete() {
  for (size_t unit : std::exchange(reducing_, {})) {
    if (kept_.gradients == Kept::shard) {
      written_ -= shapes_.units[unit].numel;
      written_unpadded_ -= shapes_.units[unit].held;
    }
    if (++rounds_done_[unit] < rounds_) continue;
    // The sum of the shards is on its way to the copies until the step ends.
    const UnitShape& shape = shapes_.units[unit];
    copies_[shape.group].add(device_scratch(config_.engine(), shape.copies / shape.ranks,
                                            shape.copy(), shape.shard(),
                                            dtype_of_gradient_sum(config_)));
  }
  shards_ = {};
  count_scratch();
}

void ZeroWalk::count_scratch() {
  int64_t bytes = 0;
  for (const auto& [group, of_group] : shards_) bytes += of_group.bytes;
  for (const auto& [group, of_group] : copies_) bytes += of_group.bytes;
  scratch = std::max(scratch, bytes);
}

}  // namespace usp
