#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

/// OpenMP's thread counts. They exist also in builds without OpenMP, which ThreadSanitizer does not
/// know.
namespace usp {

/// Threads that a kernel called from this thread uses.
inline int num_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

/// This thread's number in a parallel region, from 0.
inline int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

/// Sets num_threads() for kernels called from this thread; other threads keep theirs.
inline void set_num_threads([[maybe_unused]] int count) {
#ifdef _OPENMP
  omp_set_num_threads(count);
#endif
}

}  // namespace usp
