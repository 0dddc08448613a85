#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tensor/tensor.h"
#include "types/kind.h"

namespace usp {
struct Parameter;
}

namespace usp::types {

/// Elements of a tensor, or columns of all its rows.
struct Part {
  int64_t begin, end;

  Part within(const Part& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
  bool empty() const { return begin >= end; }
  int64_t size() const { return end - begin; }
  Part operator+(int64_t offset) const { return {begin + offset, end + offset}; }
  bool operator==(const Part&) const = default;
};
/// All of a tensor, however long it is.
inline constexpr Part kWhole = {0, std::numeric_limits<int64_t>::max() / 2};

/// A part of a storage that is of one type.
struct Region : Part {
  Type type;
  std::string_view origin;               ///< the operation that wrote it; empty: nothing has
  int block = -1;                        ///< where
  const Parameter* parameter = nullptr;  ///< whose values these are; nullptr: of none
  int64_t link = -1;                     ///< in Checker::history(): what wrote it; -1: not kept
  int16_t reading = 0, arriving = 0;     ///< messages under way that read it, or write it
  bool is_gathered = false;              ///< a message has given it to the ranks that differ in it
  bool is_unread_gradient = false;       ///< a gradient that nothing has read yet

  bool is_written() const { return !origin.empty(); }
};

/// The types of all tensors of a rank. A type lies on the storage, so that views and what is
/// written through them agree; tensors are told apart by addresses, which place() makes up.
class Regions {
 public:
  /// The address of a new storage of so many bytes, which holds nothing.
  void* place(int64_t bytes);

  /// The regions that a part consists of, begin and end counted from the tensor's own first element
  /// or column; none where the tensor has no elements.
  std::vector<Region> of(const Tensor& tensor, Part part = kWhole);
  /// In what these are counted.
  int64_t width(const Tensor& tensor) { return locate(tensor).size(); }
  /// The regions of a part take what `change(Region&)` makes of them.
  template <class Change>
  void change(const Tensor& tensor, Part part, const Change& change) {
    const std::span<Region> regions = cut_out(tensor, part);
    for (Region& region : regions) change(region);
    if (!regions.empty()) join_alike(tensor, regions);
  }
  /// Says of a tensor that nothing has written that its rows are so many columns, if it consists of
  /// such rows.
  void divide_into_columns(const Tensor& tensor, int64_t columns);
  /// How long rows are where regions are columns; 0: they are elements.
  int64_t period(const Tensor& tensor) { return storage(tensor).period; }
  /// A gradient that nothing has read, in any storage so far; nothing where there is none.
  std::optional<Region> unread_gradient() const;

 private:
  struct Storage {
    uintptr_t begin;
    std::vector<Region> regions;  ///< side by side, from 0 on
    int64_t period = 0;

    /// Nothing has been written, or said of columns.
    bool is_new() const { return regions.front().end == kWhole.end; }
  };
  Storage& storage(const Tensor& tensor);
  int64_t offset(const Tensor& tensor);  ///< of its first element
  Part locate(const Tensor& tensor);
  /// A part as whole regions.
  std::span<Region> cut_out(const Tensor& tensor, Part part);
  /// Regions that are alike become one: these, and the one before them.
  void join_alike(const Tensor& tensor, std::span<const Region> changed);

  uintptr_t next_ = 4096;
  std::vector<Storage> storages_;  ///< by address; of those let go of, too: no address comes again
  size_t last_ = 0;                ///< the one that was asked for last, as the next often is
};

}  // namespace usp::types
