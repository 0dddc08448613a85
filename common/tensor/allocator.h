#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <vector>

#include "tensor/device.h"

namespace usp {

/// What a tensor's bytes are spent on. The order is that of the memory tables and plots.
enum class Category : uint8_t {
  weights,
  gradients,
  optimizer,
  activations,
  communication,
  workspace,
};
inline constexpr int kNumCategories = 6;

/// As the records have it, such as "activations".
std::string_view name(Category category);

/// What an allocation is for: its category and, for the memory profile, the model's block and the
/// kind of tensor.
struct MemoryTag {
  Category category;
  int block = -1;         ///< -1: of none
  std::string_view name;  ///< a literal such as "qkv"; may be empty

  MemoryTag(Category tag_category, int tag_block = -1, std::string_view tag_name = {})  // NOLINT
      : category(tag_category), block(tag_block), name(tag_name) {}
};

/// Hands out memory, keeps freed blocks for reuse, and counts what is live by category.
///
/// Requests are rounded up to a size class, eight to each doubling, so that at most an eighth is
/// wasted. A freed block serves requests of its own class only. Every training step asks for the
/// same sizes in the same order. So the second step finds in each class what the first one needed,
/// and does not ask the system again. The lowest address goes first, so pointers repeat as well.
/// Workspace has blocks of its own: how much of it a kernel wants depends on the device, which must
/// not change what everything else takes from the system.
///
/// On the meta device nothing is allocated: the allocator counts requests, and hands blocks out and
/// takes them back as it would elsewhere. It is not thread-safe: one allocator belongs to one rank,
/// whose OpenMP workers never allocate.
class Allocator {
 public:
  /// One allocation (bytes > 0) or release (bytes < 0), for the memory timeline.
  struct Event {
    int64_t nanoseconds;  ///< steady clock of the host, which may be ahead of a device
    int64_t bytes;
    MemoryTag tag;
    int64_t live_bytes;  ///< of the category, afterwards
  };

  /// `accelerator`: whose memory it is; for Device::cpu, pinned memory of the host that goes with
  /// it, or nullptr for memory of the system.
  explicit Allocator(Device device, std::shared_ptr<Accelerator> accelerator = nullptr)
      : device_(device), accelerator_(std::move(accelerator)) {}
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  /// Memory for `bytes` bytes, 64-byte aligned, contents undefined; nullptr for 0 bytes and on
  /// meta. Throws Error when the system has none left, naming what is live.
  void* allocate(int64_t bytes, const MemoryTag& tag);
  /// Returns what allocate() gave for the same `bytes` and `tag`.
  void release(void* pointer, int64_t bytes, const MemoryTag& tag);

  Device device() const { return device_; }
  Accelerator* accelerator() const { return accelerator_.get(); }
  int64_t live_bytes(Category category) const { return live_[static_cast<int>(category)]; }
  int64_t live_bytes() const { return live_total_; }  ///< as requested, all categories
  int64_t peak_bytes(Category category) const { return peak_[static_cast<int>(category)]; }
  int64_t peak_bytes() const { return peak_total_; }  ///< of the sum, not sum of peaks
  /// Bytes taken from the system; on meta, those that would have been.
  int64_t reserved_bytes() const { return reserved_ + reserved_workspace_; }
  int64_t reserved_workspace_bytes() const { return reserved_workspace_; }  ///< of these
  int64_t system_allocations() const { return system_allocations_; }  ///< requests to the system
  /// Forgets the peaks: new ones begin at the live bytes.
  void reset_peaks();

  /// Whether allocations and releases are appended to events().
  void record_events(bool on);
  /// Bytes of the category that were live when recording first began.
  int64_t initial_bytes(Category category) const { return initial_[static_cast<int>(category)]; }
  const std::vector<Event>& events() const { return events_; }

 private:
  /// Free blocks of one size class, for workspace or for everything else.
  struct Shelf {
    std::set<void*> blocks;
    int64_t pretended = 0;  ///< how many there are on meta
  };
  using ShelfKey = std::pair<bool, int64_t>;  ///< workspace?, size class

  void count(int64_t bytes, const MemoryTag& tag);
  void* allocate_from_system(const ShelfKey& key, const MemoryTag& tag);
  void* take(int64_t bytes);
  void give_back(void* pointer);
  [[noreturn]] void fail_for_memory(int64_t bytes, const MemoryTag& tag) const;
  int64_t& reserved(bool workspace) { return workspace ? reserved_workspace_ : reserved_; }
  void release_cached_blocks();

  Device device_;
  std::shared_ptr<Accelerator> accelerator_;
  std::array<int64_t, kNumCategories> live_{};
  std::array<int64_t, kNumCategories> peak_{};
  int64_t live_total_ = 0;
  int64_t peak_total_ = 0;
  int64_t reserved_ = 0, reserved_workspace_ = 0;
  int64_t system_allocations_ = 0;
  std::map<ShelfKey, Shelf> cached_;
  bool recording_ = false;
  std::array<int64_t, kNumCategories> initial_{};
  std::vector<Event> events_;
};

}  // namespace usp
