#include "allocator.h"

#include <sys/mman.h>

#include <chrono>
#include <cstdlib>

#include "check.h"

namespace usp {

namespace {

constexpr int64_t kSmallGranularity = 512;
constexpr int64_t kLargeGranularity = int64_t{64} << 10;
constexpr int64_t kLargeBlock = int64_t{1} << 20;
constexpr int64_t kHugePage = int64_t{2} << 20;

int64_t round_up(int64_t bytes) {
  const int64_t granularity = bytes < kLargeBlock ? kSmallGranularity : kLargeGranularity;
  return (bytes + granularity - 1) / granularity * granularity;
}

}  // namespace

std::string_view name(Device device) { return device == Device::cpu ? "cpu" : "meta"; }

std::string_view name(Category category) {
  static constexpr std::array<std::string_view, kNumCategories> kNames = {
      "weights", "gradients", "optimizer", "activations", "communication", "workspace"};
  return kNames[static_cast<int>(category)];
}

Allocator::~Allocator() { release_cached_blocks(); }

void* Allocator::allocate(int64_t bytes, Category category) {
  count(bytes, category);
  if (bytes == 0 || device_ == Device::meta) return nullptr;
  const int64_t rounded = round_up(bytes);
  const auto cached = cached_.lower_bound({rounded, nullptr});
  if (cached != cached_.end() && cached->bytes <= rounded + rounded / 8) {
    void* pointer = cached->pointer;
    block_bytes_[pointer] = cached->bytes;
    cached_.erase(cached);
    return pointer;
  }
  void* pointer = allocate_from_system(rounded);
  block_bytes_[pointer] = rounded;
  return pointer;
}

void Allocator::release(void* pointer, int64_t bytes, Category category) {
  count(-bytes, category);
  if (pointer == nullptr) return;
  const auto block = block_bytes_.find(pointer);
  cached_.insert({block->second, pointer});
  block_bytes_.erase(block);
}

void Allocator::reset_peaks() {
  peak_ = live_;
  peak_total_ = live_total_;
}

void Allocator::count(int64_t bytes, Category category) {
  const int index = static_cast<int>(category);
  live_[index] += bytes;
  live_total_ += bytes;
  peak_[index] = std::max(peak_[index], live_[index]);
  peak_total_ = std::max(peak_total_, live_total_);
  if (recording_ && bytes != 0) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    events_.push_back({std::chrono::nanoseconds(now).count(), bytes, category});
  }
}

void* Allocator::allocate_from_system(int64_t rounded) {
  const int64_t alignment = rounded >= kHugePage ? kHugePage : 64;
  void* pointer = nullptr;
  if (posix_memalign(&pointer, alignment, rounded) != 0) {
    release_cached_blocks();
    if (posix_memalign(&pointer, alignment, rounded) != 0) {
      fail("out of memory: {} bytes asked for, {} bytes live, {} bytes reserved", rounded,
           live_total_, reserved_);
    }
  }
  // Fewer page faults and TLB misses; where the kernel has no huge pages nothing changes.
  if (rounded >= kHugePage) madvise(pointer, rounded, MADV_HUGEPAGE);
  reserved_ += rounded;
  ++system_allocations_;
  return pointer;
}

void Allocator::release_cached_blocks() {
  for (const Block& block : cached_) {
    std::free(block.pointer);
    reserved_ -= block.bytes;
  }
  cached_.clear();
}

}  // namespace usp
