#include "tensor/allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "base/check.h"
#include "base/clock.h"

namespace usp {

namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;

/// The size class of a request: the next multiple of an eighth of the power of two below it.
int64_t size_class(int64_t bytes) {
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
  const int64_t step = std::max(kAlignment, power / 8);
  return (bytes + step - 1) / step * step;
}

}  // namespace

std::string_view name(Device device) {
  static constexpr std::array<std::string_view, 3> kNames = {"cpu", "cuda", "meta"};
  return kNames[static_cast<int>(device)];
}

std::string_view name(Category category) {
  static constexpr std::array<std::string_view, kNumCategories> kNames = {
      "weights", "gradients", "optimizer", "activations", "communication", "workspace"};
  return kNames[static_cast<int>(category)];
}

Allocator::~Allocator() { release_cached_blocks(); }

void* Allocator::allocate(int64_t bytes, const MemoryTag& tag) {
  count(bytes, tag);
  if (bytes == 0) return nullptr;
  const ShelfKey key{tag.category == Category::workspace, size_class(bytes)};
  Shelf& shelf = cached_[key];
  if (device_ == Device::meta) {
    if (shelf.pretended == 0) {
      reserved(key.first) += key.second;
    } else {
      --shelf.pretended;
    }
    return nullptr;
  }
  if (shelf.blocks.empty()) return allocate_from_system(key, tag);
  return shelf.blocks.extract(shelf.blocks.begin()).value();
}

void Allocator::release(void* pointer, int64_t bytes, const MemoryTag& tag) {
  count(-bytes, tag);
  if (bytes == 0) return;
  Shelf& shelf = cached_[{tag.category == Category::workspace, size_class(bytes)}];
  if (device_ == Device::meta) {
    ++shelf.pretended;
  } else {
    shelf.blocks.insert(pointer);
    if (accelerator_ != nullptr && device_ == Device::cuda) accelerator_->released(pointer, bytes);
  }
}

void Allocator::record_events(bool on) {
  if (on && !recording_ && events_.empty()) initial_ = live_;
  recording_ = on;
}

void Allocator::reset_peaks() {
  peak_ = live_;
  peak_total_ = live_total_;
}

void Allocator::count(int64_t bytes, const MemoryTag& tag) {
  const int index = static_cast<int>(tag.category);
  live_[index] += bytes;
  live_total_ += bytes;
  peak_[index] = std::max(peak_[index], live_[index]);
  peak_total_ = std::max(peak_total_, live_total_);
  if (recording_ && bytes != 0) {
    events_.push_back({clock_ns(), bytes, tag, live_[index]});
  }
}

void* Allocator::allocate_from_system(const ShelfKey& key, const MemoryTag& tag) {
  const int64_t rounded = key.second;
  void* pointer = take(rounded);
  if (pointer == nullptr) {
    release_cached_blocks();
    pointer = take(rounded);
    if (pointer == nullptr) fail_for_memory(rounded, tag);
  }
  reserved(key.first) += rounded;
  ++system_allocations_;
  return pointer;
}

/// nullptr where there is none left.
void* Allocator::take(int64_t bytes) {
  if (accelerator_ != nullptr) return accelerator_->take(device_, bytes);
  void* pointer = nullptr;
  if (posix_memalign(&pointer, bytes >= kHugePage ? kHugePage : kAlignment, bytes) != 0) {
    return nullptr;
  }
  // Fewer page faults and TLB misses; where the kernel has no huge pages nothing changes.
  if (bytes >= kHugePage) madvise(pointer, bytes, MADV_HUGEPAGE);
  return pointer;
}

void Allocator::give_back(void* pointer) {
  if (accelerator_ != nullptr) return accelerator_->give_back(device_, pointer);
  std::free(pointer);
}

void Allocator::fail_for_memory(int64_t bytes, const MemoryTag& tag) const {
  std::string live;
  for (int i = 0; i < kNumCategories; ++i) {
    if (live_[i] == 0) continue;
    live += fmt::format("{}{} of {}", live.empty() ? "" : ", ", live_[i], name(Category(i)));
  }
  const std::string left = device_ == Device::cuda ? fmt::format(", {} bytes left on the device",
                                                                 accelerator_->available_memory())
                                                   : "";
  fail(
      "out of memory on {}: {} bytes asked for {}{}{}, {} bytes live ({}), {} bytes reserved{}; "
      "try "
      "a smaller --micro_batch_size, or --recompute full",
      name(device_), bytes, name(tag.category), tag.name.empty() ? "" : ", ", tag.name, live_total_,
      live, reserved_bytes(), left);
}

void Allocator::release_cached_blocks() {
  for (const auto& [key, shelf] : cached_) {
    for (void* pointer : shelf.blocks) give_back(pointer);
    reserved(key.first) -= key.second * static_cast<int64_t>(shelf.blocks.size());
  }
  cached_.clear();
}

}  // namespace usp
