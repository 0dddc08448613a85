#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace usp {

inline constexpr int kMaxRank = 5;

/// The sizes of a tensor's axes: up to kMaxRank non-negative integers, stored in place.
class Shape {
 public:
  Shape() = default;
  /// Throws Error for more than kMaxRank axes or a negative size.
  Shape(std::initializer_list<int64_t> sizes);

  int rank() const { return rank_; }
  int64_t operator[](int axis) const { return sizes_[axis]; }
  int64_t& operator[](int axis) { return sizes_[axis]; }
  int64_t numel() const;          ///< product of the sizes; 1 for a scalar
  std::string to_string() const;  ///< "[2, 3]"
  bool operator==(const Shape& other) const;

  const int64_t* begin() const { return sizes_.data(); }
  const int64_t* end() const { return sizes_.data() + rank_; }

 private:
  int rank_ = 0;
  std::array<int64_t, kMaxRank> sizes_{};
};

}  // namespace usp
