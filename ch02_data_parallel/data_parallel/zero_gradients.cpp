#include <algorithm>
#include <utility>

#include "data_parallel/zero.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

/// The way of the gradients under ZeRO: written, reduced, added to the shard, freed.
namespace usp {

namespace {

/// What is there only while it is in use; `name`: in the memory profile.
Tensor buffer(int64_t numel, DType dtype, std::string_view name) {
  const CategoryScope scope(Category::communication);
  return Tensor::empty({numel}, dtype, name);
}

}  // namespace

void Zero::begin_step(int64_t micro_batches, int64_t parts) {
  reads_.assign(parts, {});
  enter(0, {}, {});  // a pass without a backward has left something
  for (Moving& moving : units_) {
    if (kept_.weights == Kept::whole) unshard(moving);  // what was loaded since the last step
  }
  rounds_ = rounds_of_step(config_.data_parallel, micro_batches);
  grads_.begin_window(micro_batches * parts / rounds_, rounds_);
}

void Zero::begin_gradient(Moving& moving) {
  if (std::ranges::count(reducing_, &moving) > 0) complete_reductions();  // last micro-batch's
  Unit& unit = moving.unit;
  ++moving.begun;
  USP_CHECK(moving.begun <= unit.parameters.size(), "block {}: a round begins before the last ends",
            unit.block());
  if (unit.gradient.defined()) return;
  // Where parts of a micro-batch take turns, another one may still write the last block's.
  const auto is_written = [](const Moving& other) { return other.ready > 0; };
  if (std::ranges::any_of(units_, is_written)) complete_reductions();
  const BlockScope block(unit.block());
  const int64_t whole = unit.length * unit.shard_group->size();
  unit.gradient = buffer(whole, layout_.reduced(), "gradients to reduce");
  ops::fill(unit.gradient.narrow(0, unit.numel, whole - unit.numel), 0);
  const bool adds_up = adds_up_before_reduction(config_);
  unit.slice_into(adds_up ? &Parameter::main_grad : &Parameter::grad, unit.gradient);
  if (!adds_up) return;
  unit.slice_into(&Parameter::grad, buffer(unit.numel, layout_.weights(), "gradients to add up"));
}

// [reduce_gradient]
void Zero::reduce_gradient(Moving& moving) {
  Unit& unit = moving.unit;
  if (++moving.ready < unit.parameters.size()) return;
  moving.begun = moving.ready = 0;
  // One at a time where its memory is wanted back, or where its sum has to go on to the copies.
  if (kept_.gradients == Kept::shard || unit.replicas->size() > 1) complete_reductions();
  Tensor output = unit.grad_shard;
  if (kept_.gradients == Kept::shard &&
      (moving.rounds_done > 0 || layout_.reduced() != layout_.gradient_sum())) {
    output = moving.addend = buffer(unit.length, layout_.reduced(), "reduced gradients");
  }
  moving.reduction = unit.shard_group->reduce_scatter_async(output, unit.gradient);
  reducing_.push_back(&moving);
}
// [reduce_gradient]

void Zero::complete_reductions() {
  for (Moving* moving : std::exchange(reducing_, {})) complete(*moving);
}

void Zero::complete(Moving& moving) {
  Unit& unit = moving.unit;
  moving.reduction.wait();
  if (moving.addend.defined()) {
    if (moving.rounds_done == 0) ops::fill(unit.grad_shard, 0);
    if (layout_.reduced() == layout_.gradient_sum()) {
      ops::add(unit.grad_shard, unit.grad_shard, moving.addend);
    } else {
      ops::accumulate(unit.grad_shard, moving.addend);
    }
    moving.addend = {};
  }
  // [complete]
  if (kept_.gradients == Kept::shard) {
    for (auto member : {&Parameter::grad, &Parameter::main_grad}) unit.slice_into(member, {});
    unit.gradient = {};
  }
  if (++moving.rounds_done < rounds_) return;
  moving.rounds_done = 0;
  moving.reduction = unit.replicas->all_reduce_async(unit.grad_shard);
  // [complete]
}

void Zero::finish() {
  complete_reductions();
  for (Moving& moving : units_) {
    USP_CHECK(moving.ready == 0 && moving.rounds_done == 0, "gradients of block {} are not reduced",
              moving.unit.block());
    moving.reduction.wait();
    reshard(moving);  // what was to stay until here
  }
  sum_over_further_groups();
}

}  // namespace usp
