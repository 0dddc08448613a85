#include "cuda/launch.h"
#include "judge/todo.h"

namespace usp {

/// y = factor x, for matrices of `rows` x `columns` that are stored row by row. The grid has any
/// number of blocks and threads: more than there are elements, or fewer.
__global__ void scale(int rows, int columns, float factor, const float* x, float* y) {
  // SOLUTION BEGIN (about 3 lines): at each step the whole grid takes neighbors
  const int64_t n = int64_t{rows} * columns, threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = cuda::thread_of_grid(); i < n; i += threads) y[i] = factor * x[i];
  // SOLUTION END
}

}  // namespace usp
