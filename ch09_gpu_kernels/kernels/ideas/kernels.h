#pragma once

#include "cuda/launch.h"
#include "ideas.h"

/// What the files with kernels share.
namespace usp::ideas {

using cuda::ceil_div;
using cuda::kThreads;
using cuda::kWarp;
using cuda::launch;

inline constexpr int64_t kSector = 32;

/// Bytes, in whole sectors, of n floats that lie together, from the beginning of a sector on.
constexpr int64_t bytes_of(int64_t n) {
  return ceil_div(n * int64_t{sizeof(float)}, kSector) * kSector;
}

/// Bytes, in whole sectors, of n floats that are read four at a time, and the last ones one by one.
constexpr int64_t bytes_by_four(int64_t n) {
  return bytes_of(n / 4 * 4) + (n % 4 > 0 ? kSector : 0);
}

/// Blocks with a thread for each of `count`.
inline int64_t blocks_for(int64_t count) { return ceil_div(count, kThreads); }

}  // namespace usp::ideas
