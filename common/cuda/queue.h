#pragma once

#include <cuda_runtime.h>

namespace usp::cuda {

/// A stream, and the line that puts a kernel into it.
struct Queue {
  cudaStream_t stream;
  const char* file;
  int line;

  Queue(cudaStream_t given,  // NOLINT: written as the stream that it is
        const char* from = __builtin_FILE(), int at = __builtin_LINE())
      : stream(given), file(from), line(at) {}
};

}  // namespace usp::cuda
