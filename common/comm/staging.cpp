#include "comm/staging.h"

#include <algorithm>
#include <cstdlib>

#include "comm/operation.h"
#include "tensor/runtime.h"

namespace usp {

Elements::Elements(const Tensor& tensor)
    : data(tensor.address()), numel(tensor.defined() ? tensor.numel() : 0), dtype(tensor.dtype()) {}

namespace {

/// Adds a copy; where the last one ends there, that one is longer.
void add(std::vector<SideCopies::Copy>& copies, const SideCopies::Copy& next) {
  if (!copies.empty()) {
    SideCopies::Copy& last = copies.back();
    if (static_cast<char*>(last.to) + last.bytes == next.to &&
        static_cast<const char*>(last.from) + last.bytes == next.from) {
      last.bytes += next.bytes;
      return;
    }
  }
  copies.push_back(next);
}

/// The parts of a copy on the host, there and on the device.
std::vector<SideCopies::Copy> copies_of(const std::vector<Elements>& parts,
                                        const Staged::Pair& tensor, bool to_device) {
  std::vector<SideCopies::Copy> copies;
  for (const Elements& part : parts) {
    if (part.numel == 0) continue;
    const int64_t at = static_cast<char*>(part.data) - static_cast<char*>(tensor.on_host.data);
    char* there = static_cast<char*>(tensor.on_device.data) + at;
    add(copies, to_device ? SideCopies::Copy{there, part.data, part.bytes()}
                          : SideCopies::Copy{part.data, there, part.bytes()});
  }
  return copies;
}

/// Bytes of pinned memory, which the system can lend to nobody else, that a rank keeps for its next
/// messages; the variable USP_MOST_PINNED gives another number.
int64_t most_pinned() {
  const char* given = std::getenv("USP_MOST_PINNED");
  return given != nullptr ? std::atoll(given) : int64_t{4} << 30;
}

}  // namespace

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
  if (pool_ != nullptr && pool_->reserved_bytes() > most_pinned()) {
    accelerator->wait();  // what was uploaded from there has arrived
    pool_ = nullptr;      // operations under way keep theirs
  }
  if (pool_ == nullptr || pool_->accelerator() != accelerator) {
    // The allocator of the runtime keeps the device alive.
    pool_ = std::make_shared<Allocator>(
        Device::cpu, std::shared_ptr<Accelerator>(runtime.allocator_in_force(), accelerator));
  }
  const Elements from = input, to = output;
  if (to.numel > 0) {
    output = take(*staged, to);
    staged->output = {to, output};
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
  staged->input = {from, input};
  operation.memory.staged = std::move(staged);
}

void Staging::download(Operation& operation) {
  const Staged& staged = *operation.memory.staged;
  for (Stage& stage : operation.stages) {
    const std::vector<SideCopies::Copy> copies =
        copies_of(stage.input, staged.input, /*to_device=*/false);
    // Where a stage needs nothing new, that which it overwrites may still be on its way.
    if (!copies.empty() || &stage == operation.stages.data()) {
      stage.staged = staged.copies->download(copies);
    }
  }
}

bool Staging::ready(const Stage& stage) {
  return stage.staged == nullptr || stage.staged->passed();
}

void Staging::upload(const Operation& operation, Stage& stage) {
  if (operation.memory.staged == nullptr) return;
  const Staged& staged = *operation.memory.staged;
  const std::vector<SideCopies::Copy> copies =
      copies_of(stage.output, staged.output, /*to_device=*/true);
  if (!copies.empty()) stage.uploaded = staged.copies->upload(copies);
}

void Staging::await(const Operation& operation) {
  for (const Stage& stage : operation.stages) {
    if (stage.staged != nullptr) stage.staged->wait();
  }
}

void Staging::end(const Operation& operation) {
  // They go one after the other, so the last one is behind all.
  const auto last = std::find_if(operation.stages.rbegin(), operation.stages.rend(),
                                 [](const Stage& stage) { return stage.uploaded != nullptr; });
  if (last == operation.stages.rend()) return;
  operation.memory.staged->copies->hold_work_until(*last->uploaded);
}

}  // namespace usp
