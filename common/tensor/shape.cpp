#include "tensor/shape.h"

#include <algorithm>

#include "base/check.h"

namespace usp {

Shape::Shape(std::initializer_list<int64_t> sizes) : rank_(static_cast<int>(sizes.size())) {
  USP_CHECK(rank_ <= kMaxRank, "a tensor has at most {} axes, not {}", kMaxRank, sizes.size());
  std::copy(sizes.begin(), sizes.end(), sizes_.begin());
  for (int64_t size : sizes) USP_CHECK(size >= 0, "negative size in shape {}", to_string());
}

int64_t Shape::numel() const {
  int64_t product = 1;
  for (int64_t size : *this) product *= size;
  return product;
}

std::string Shape::to_string() const {
  return fmt::format("[{}]", fmt::join(begin(), end(), ", "));
}

bool Shape::operator==(const Shape& other) const {
  return std::equal(begin(), end(), other.begin(), other.end());
}

}  // namespace usp
