#pragma once

#include <cstdint>

namespace usp {

/// Elements [begin, end) of a parameter; none where both are equal.
struct ShardBounds {
  int64_t begin, end;
};

}  // namespace usp
