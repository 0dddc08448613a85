#include "cuda/hopper.h"
#include "cuda/reduce.h"
#include "kernels.h"

/// LayerNorm without weights, a block a row: y = (x - mean) / sqrt(variance + eps).
namespace usp::ideas {

namespace {

constexpr float kEps = 1e-5F;

// [three_passes]
/// The row is read from global memory for its mean, its variance and its result.
__global__ void three_passes(int columns, const float* x, float* y) {
  __shared__ float of_mean[kWarp], of_variance[kWarp];
  const float* const row = x + int64_t{blockIdx.x} * columns;
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  float sum = 0, squares = 0;
  for (int i = first; i < columns; i += step) sum += row[i];
  const float mean = cuda::block_sum(sum, of_mean) / columns;
  for (int i = first; i < columns; i += step) squares += (row[i] - mean) * (row[i] - mean);
  const float variance = cuda::block_sum(squares, of_variance) / columns;
  const float scale = rsqrtf(variance + kEps);
  for (int i = first; i < columns; i += step) {
    y[int64_t{blockIdx.x} * columns + i] = (row[i] - mean) * scale;
  }
}
// [three_passes]

// [row_in_shared]
/// Once from global memory; a thread keeps its numbers of the row in shared memory.
__global__ void row_in_shared(int columns, const float* x, float* y) {
  __shared__ float of_mean[kWarp], of_variance[kWarp];
  auto* const row = cuda::dynamic_shared<float>();
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  float sum = 0, squares = 0;
  for (int i = first; i < columns; i += step) {
    row[i] = x[int64_t{blockIdx.x} * columns + i];
    sum += row[i];
  }
  const float mean = cuda::block_sum(sum, of_mean) / columns;
  for (int i = first; i < columns; i += step) squares += (row[i] - mean) * (row[i] - mean);
  const float variance = cuda::block_sum(squares, of_variance) / columns;
  const float scale = rsqrtf(variance + kEps);
  for (int i = first; i < columns; i += step) {
    y[int64_t{blockIdx.x} * columns + i] = (row[i] - mean) * scale;
  }
}
// [row_in_shared]

/// Rows that begin within a sector touch one more, each warp at each step.
Counts predict(Shape s, int passes) {
  const int64_t beyond = s.columns % 8 == 0 ? 0 : ceil_div(s.columns, kWarp) * kSector;
  return {.bytes = (passes + 1) * s.rows * (bytes_of(s.columns) + beyond),
          .flops = 7 * s.n(),
          .barriers = 2 * int64_t{s.rows}};
}

const Rung kRungs[] = {
    {"three_passes", "mean, variance and result read the row", 75,
     [](Shape s) { return predict(s, 3); },
     [](const cuda::Queue& queue, const Data& d) {
       launch(three_passes, d.shape.rows, kThreads, 0, queue, d.shape.columns, d.x, d.y);
     }},
    {"row_in_shared", "the row is read once", 75, [](Shape s) { return predict(s, 1); },
     [](const cuda::Queue& queue, const Data& d) {
       launch(row_in_shared, d.shape.rows, kThreads, int64_t{d.shape.columns} * 4, queue,
              d.shape.columns, d.x, d.y);
     }},
};

}  // namespace

const Ideas kLayerNorm{"layer_norm", kRungs};

}  // namespace usp::ideas
