#include "comm/staging.h"

#include "comm/operation.h"
#include "tensor/runtime.h"

namespace usp {

Elements::Elements(const Tensor& tensor)
    : data(tensor.address()), numel(tensor.defined() ? tensor.numel() : 0), dtype(tensor.dtype()) {}

Elements Staging::take(Staged& staged, const Elements& like) {
  const MemoryTag tag(Category::communication, /*tag_block=*/-1, "staged messages");
  const int64_t bytes = like.bytes();
  void* pointer = pool_->allocate(bytes, tag);
  staged.memory.emplace_back(
      pointer, [pool = pool_, bytes, tag](void* block) { pool->release(block, bytes, tag); });
  return {pointer, like.numel, like.dtype};
}

void Staging::begin(Operation& operation, Elements& input, Elements& output) {
  Runtime& runtime = Runtime::current();
  Accelerator* accelerator = runtime.accelerator();
  auto staged = std::make_shared<Staged>();
  staged->copies = dynamic_cast<SideCopies*>(accelerator);
  USP_CHECK(staged->copies != nullptr, "{}: this device sends no tensors", operation.to_string());
  if (pool_ == nullptr || pool_->accelerator() != accelerator) {
    // The allocator of the runtime keeps the device alive.
    pool_ = std::make_shared<Allocator>(
        Device::cpu, std::shared_ptr<Accelerator>(runtime.allocator_in_force(), accelerator));
  }
  const Elements from = input, to = output;
  if (to.numel > 0) {
    output = take(*staged, to);
    staged->back.push_back({to.data, output.data, to.bytes()});
  }
  if (from.numel > 0) {
    if (operation.kind == CommKind::all_reduce) {
      input = output;
    } else if (operation.kind == CommKind::all_gather) {
      input.data = output.at(operation.group->rank * from.numel);
    } else {
      input = take(*staged, from);
    }
  }
  staged->on_device = from;
  staged->on_host = input;
  operation.memory.staged = std::move(staged);
}

void Staging::download(Operation& operation) {
  const Staged& staged = *operation.memory.staged;
  for (Stage& stage : operation.stages) {
    std::vector<SideCopies::Copy> copies;
    for (const Elements& part : stage.input) {
      if (part.numel == 0) continue;
      const int64_t at = static_cast<char*>(part.data) - static_cast<char*>(staged.on_host.data);
      copies.push_back({part.data, static_cast<char*>(staged.on_device.data) + at, part.bytes()});
    }
    // Where a stage needs nothing new, that which it overwrites may still be on its way.
    if (!copies.empty() || &stage == operation.stages.data()) {
      stage.staged = staged.copies->download(copies);
    }
  }
}

bool Staging::ready(const Stage& stage) {
  return stage.staged == nullptr || stage.staged->passed();
}

void Staging::finish(Operation& operation) {
  if (operation.memory.staged == nullptr || operation.memory.staged->back.empty()) return;
  operation.memory.staged->uploaded =
      operation.memory.staged->copies->upload(operation.memory.staged->back);
}

void Staging::await(const Operation& operation) {
  for (const Stage& stage : operation.stages) {
    if (stage.staged != nullptr) stage.staged->wait();
  }
}

void Staging::end(const Operation& operation) {
  if (operation.memory.staged == nullptr || operation.memory.staged->uploaded == nullptr) return;
  operation.memory.staged->copies->hold_work_until(*operation.memory.staged->uploaded);
}

}  // namespace usp
