#include "cuda/launch.h"
#include "judge/todo.h"

namespace usp {

/// y = factor x, for matrices of `rows` x `columns` that are stored row by row. The grid has any
/// number of blocks and threads: more than there are elements, or fewer.
__global__ void scale(int rows, int columns, float factor, const float* x, float* y) {
  // TODO (about 3 lines): at each step the whole grid takes neighbors
  USP_TODO("ch09.ex7");
}

}  // namespace usp
