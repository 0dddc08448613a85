#pragma once

#include <cuda_runtime.h>

/// Read before every kernel file that is compiled with checks: a test can leave out one barrier.
namespace usp::test {

/// Whether the barrier of this place is to be left out; remembers the place.
bool leaves_out(const char* file, int line);

}  // namespace usp::test

#define __syncthreads() \
  (usp::test::leaves_out(__builtin_FILE(), __LINE__) ? (void)0 : (__syncthreads)())
#define __syncwarp() (usp::test::leaves_out(__builtin_FILE(), __LINE__) ? (void)0 : (__syncwarp)())
