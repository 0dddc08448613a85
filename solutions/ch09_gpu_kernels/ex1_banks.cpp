#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "judge/todo.h"

namespace usp {

/// y = the transpose of x, which has `rows` x `columns` numbers. A block of eight warps turns a
/// tile of 32 x 32, which begins in this row and column of x. Its shared memory has 1,024 numbers:
/// number p lies in bank p % 32.
__global__ void transpose(int rows, int columns, const float* x, float* y) {
  const int top = static_cast<int>(blockIdx.y) * 32, left = static_cast<int>(blockIdx.x) * 32;
  float* const tile = cuda::dynamic_shared<float>();
  // SOLUTION BEGIN (about 10 lines): a warp brings rows of x, and later takes columns of them
  const int lane = cuda::lane();
  for (int row = cuda::warp(); row < 32; row += 8) {
    if (top + row >= rows || left + lane >= columns) continue;
    tile[row * 32 + (lane ^ row)] = x[int64_t{top + row} * columns + left + lane];
  }
  __syncthreads();
  for (int column = cuda::warp(); column < 32; column += 8) {
    if (top + lane >= rows || left + column >= columns) continue;
    y[int64_t{left + column} * rows + top + lane] = tile[lane * 32 + (column ^ lane)];
  }
  // SOLUTION END
}

}  // namespace usp
