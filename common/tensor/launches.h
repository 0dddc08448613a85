#pragma once

#include <cstdint>

namespace usp {

/// Kernels that this thread has given to its device so far. A product of a library counts as one.
inline thread_local int64_t launches = 0;

}  // namespace usp
