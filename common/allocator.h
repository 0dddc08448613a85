#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string_view>
#include <vector>

namespace usp {

enum class Device : uint8_t {
  cpu,
  meta,  ///< shapes without data: every op checks and counts, none computes
};

std::string_view name(Device device);

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

std::string_view name(Category category);

/// Hands out memory, keeps freed blocks for reuse, and counts what is live by category.
///
/// A step of training asks for the same sizes in the same order every time, so from the second
/// step on every request finds the block it had before: the system is not asked again and
/// pointers repeat. Which cached block serves a request depends on the set of cached blocks
/// alone (smallest that fits with at most an eighth wasted, lowest address first).
///
/// On the meta device requests are counted and nothing is allocated. Not thread-safe: one
/// allocator belongs to one rank, whose OpenMP workers never allocate.
class Allocator {
 public:
  /// One allocation (bytes > 0) or release (bytes < 0), for the memory timeline.
  struct Event {
    int64_t nanoseconds;  ///< steady clock
    int64_t bytes;
    Category category;
  };

  explicit Allocator(Device device) : device_(device) {}
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  /// Memory for `bytes` bytes, 64-byte aligned, contents undefined; nullptr for 0 bytes and on
  /// meta. Throws Error when the system has none left, naming what is live.
  void* allocate(int64_t bytes, Category category);
  /// Returns what allocate() gave for the same `bytes` and `category`.
  void release(void* pointer, int64_t bytes, Category category);

  Device device() const { return device_; }
  int64_t live_bytes(Category category) const { return live_[static_cast<int>(category)]; }
  int64_t live_bytes() const { return live_total_; }  ///< as requested, all categories
  int64_t peak_bytes(Category category) const { return peak_[static_cast<int>(category)]; }
  int64_t peak_bytes() const { return peak_total_; }    ///< of the sum, not sum of peaks
  int64_t reserved_bytes() const { return reserved_; }  ///< taken from the system
  int64_t system_allocations() const { return system_allocations_; }  ///< requests to the system
  /// Forgets the peaks: the live bytes are the new ones.
  void reset_peaks();

  /// Whether allocations and releases are appended to events().
  void record_events(bool on) { recording_ = on; }
  const std::vector<Event>& events() const { return events_; }

 private:
  struct Block {
    int64_t bytes;
    void* pointer;
    bool operator<(const Block& other) const {
      return bytes != other.bytes ? bytes < other.bytes : pointer < other.pointer;
    }
  };

  void count(int64_t bytes, Category category);
  void* allocate_from_system(int64_t rounded);
  void release_cached_blocks();

  Device device_;
  std::array<int64_t, kNumCategories> live_{};
  std::array<int64_t, kNumCategories> peak_{};
  int64_t live_total_ = 0;
  int64_t peak_total_ = 0;
  int64_t reserved_ = 0;
  int64_t system_allocations_ = 0;
  std::set<Block> cached_;
  std::map<void*, int64_t> block_bytes_;  ///< real size of every block in use
  bool recording_ = false;
  std::vector<Event> events_;
};

}  // namespace usp
