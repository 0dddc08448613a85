#include "data_parallel/zero.h"

#include <algorithm>

#include "tensor/runtime.h"

namespace usp {

/// The first or the last segment of a block: the block's weights are there when the pass goes on,
/// and those of the block that runs next are on their way. At the end of a chunk that is the one
/// before: its backward pass turns around there.
class Zero::Boundary : public Segment {
 public:
  enum End { first, last };

  Boundary(Zero& zero, End end, Units own, Units before, Units after, Units stay)
      : zero_(zero),
        end_(end),
        own_(std::move(own)),
        before_(std::move(before)),
        after_(std::move(after)),
        stay_(std::move(stay)) {}
  std::string_view name() const override { return "unshard"; }

  Tensor forward(const Tensor& x, BlockSaved&, const Pass& pass) override {
    if (end_ == first) zero_.enter(pass.part, own_, turns(pass) ? before_ : after_, stay_);
    return x;
  }

  Tensor backward(const Tensor& dy, BlockSaved&, Grads&, const Pass& pass) override {
    if (end_ == last) {
      zero_.enter(pass.part, own_, before_, stay_);
    } else if (before_.empty()) {
      zero_.enter(pass.part, {}, {}, stay_);  // no block is left whose backward reads weights
    }
    return dy;
  }

 private:
  /// Whether backward runs next: at the end of a chunk, or where this is its own forward once more.
  bool turns(const Pass& pass) const {
    if (pass.mode == Pass::Mode::recompute) return true;
    return after_.empty() && pass.mode == Pass::Mode::train;
  }

  Zero& zero_;
  End end_;
  Units own_, before_, after_;  ///< what this block reads, and its neighbors in the chunk
  Units stay_;                  ///< through this pass and those that follow it in the chunk
};

Zero::Zero(const TrainConfig& config, Model& model, Grads& grads, Optimizer& optimizer,
           const Mesh& mesh)
    : DataParallelStrategy(model.parameters(), grads, mesh),
      config_(config),
      layout_(config, model.parameters(), mesh),
      kept_(layout_.kept()) {
  for (Unit& unit : layout_.units()) units_.emplace_back(unit);
  surround_blocks(model);
  grads.on_first([this](Parameter& parameter) { begin_gradient(moving(parameter)); });
  grads.on_ready([this](Parameter& parameter) { reduce_gradient(moving(parameter)); });
  if (kept_.weights == Kept::whole && config.data_parallel.gather_overlap == "optimizer") {
    optimizer.on_updated([this](const Parameter& parameter) {
      Moving& updated = moving(parameter);
      if (&parameter == updated.unit.parameters.back()) unshard(updated);
    });
  }
}

int64_t Zero::num_buckets() const { return std::ssize(units_); }

Zero::Moving& Zero::moving(const Parameter& parameter) {
  return units_[&layout_.unit_of(parameter) - layout_.units().data()];
}

Zero::Units Zero::read_by(int64_t block) {
  Units read;
  for (Moving& moving : units_) {
    if (moving.unit.serves(block)) read.push_back(&moving);
  }
  return read;
}

Zero::Units Zero::stay_through(const BlockRange& chunk) {
  const std::string& after = config_.data_parallel.reshard_after;
  Units stay;
  for (Moving& moving : units_) {
    bool stays = after == "step";
    for (int64_t block = chunk.begin; after == "chunk" && block < chunk.end; ++block) {
      stays = stays || moving.unit.serves(block);
    }
    if (stays) stay.push_back(&moving);
  }
  return stay;
}

void Zero::surround_blocks(Model& model) {
  for (size_t chunk = 0; chunk < model.ranges().size(); ++chunk) {
    const auto [begin, end] = model.ranges()[chunk];
    const Units stay = stay_through({begin, end});
    Units before;  // what the backward pass of the block before reads
    for (int64_t number = begin; number < end; ++number) {
      Block& block = model.chunk(chunk)[number - begin];
      const bool lookup = dynamic_cast<const Embedding*>(block.front().get()) != nullptr;
      const Units own = read_by(number);
      const Units after = number + 1 < end ? read_by(number + 1) : Units();
      const auto boundary = [&](Boundary::End at, const Units& units) {
        return std::make_unique<Boundary>(*this, at, units, before, after, stay);
      };
      block.insert(block.begin(), boundary(Boundary::first, own));
      const Units in_backward = lookup ? Units() : own;
      if (kept_.weights == Kept::shard) block.push_back(boundary(Boundary::last, in_backward));
      before = in_backward;
    }
  }
}

// [enter]
void Zero::enter(int64_t part, const Units& units, const Units& next, const Units& stay) {
  reads_[part] = units;
  bool together = true;
  for (Moving& other : units_) {
    const auto has_it = [&](const Units& some) { return std::ranges::count(some, &other) > 0; };
    if (has_it(units) || has_it(next) || has_it(stay)) continue;
    const bool is_read = std::ranges::any_of(reads_, has_it);  // by a part that is a block behind
    together = together && !is_read;
    if (!is_read) reshard(other);
  }
  for (Moving* moving : units) unshard(*moving);
  // The prefetch, by the last part to come: it arrives while `units` compute.
  for (Moving* moving : together ? next : Units()) unshard(*moving);
  for (Moving* moving : units) moving->gathering.wait();
}
// [enter]

// [unshard]
/// Begins to make the weights whole, unless they are or soon will be.
void Zero::unshard(Moving& moving) {
  Unit& unit = moving.unit;
  const int64_t version = unit.parameters.front()->version;
  if (unit.values.defined() && moving.version == version) return;
  reshard(moving);
  if (kept_.weights == Kept::shard) {
    const BlockScope block(unit.block());
    const CategoryScope scope(Category::communication);
    unit.values = Tensor::empty({unit.length * unit.shard_group->size()}, layout_.weights(),
                                "gathered weights");
    unit.slice_into(&Parameter::value, unit.values);
  }
  moving.gathering = unit.shard_group->all_gather_async(unit.values, unit.value_shard);
  moving.version = version;
}
// [unshard]

void Zero::reshard(Moving& moving) {
  if (kept_.weights == Kept::whole || !moving.unit.values.defined()) return;
  moving.gathering.wait();
  moving.unit.slice_into(&Parameter::value, {});
  moving.unit.values = {};
}

void Zero::after_update() {
  if (kept_.weights == Kept::whole) {
    for (Moving& moving : units_) unshard(moving);
  }
  if (config_.data_parallel.gather_overlap == "forward") return;  // where a block begins, it waits
  for (Moving& moving : units_) moving.gathering.wait();
}

Operations Zero::operations() const {
  Operations all(*units_.front().unit.shard_group, CommKind::reduce_scatter);
  for (const Moving& moving : units_) {
    all.add(*moving.unit.shard_group, CommKind::reduce_scatter)
        .add(*moving.unit.shard_group, CommKind::all_gather)
        .add(*moving.unit.replicas, CommKind::all_reduce);
  }
  return all;
}

std::unique_ptr<DataParallelStrategy> make_data_parallel(const TrainConfig& config, Model& model,
                                                         Grads& grads, Optimizer& optimizer,
                                                         const Mesh& mesh) {
  if (config.data_parallel.zero_stage > 0) {
    return std::make_unique<Zero>(config, model, grads, optimizer, mesh);
  }
  model.parameters().allocate(parse_dtype(config.dtype), config.seed,
                              parse_grad_accumulation(config.grad_accumulation));
  return std::make_unique<DataParallel>(config.data_parallel, model.parameters(), grads, mesh);
}

}  // namespace usp
