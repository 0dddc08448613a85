#pragma once

#include <cstdint>

namespace usp {

/// Consecutive indices: [begin, begin + count).
struct Stretch {
  int64_t begin, count;
};

/// Stretch `which` of so many that a length is cut into; they differ by one at most.
inline Stretch cut(int64_t length, int64_t which, int64_t stretches) {
  const int64_t begin = length * which / stretches;
  return {begin, length * (which + 1) / stretches - begin};
}

}  // namespace usp
