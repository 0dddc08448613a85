#include "kernels.h"

/// A copy of a matrix: what 32 lanes ask for at once is what lies in the sectors that they touch.
namespace usp::ideas {

namespace {

// [row_a_thread]
__global__ void row_a_thread(Shape s, const float* x, float* y) {
  const int64_t row = cuda::thread_of_grid();
  if (row >= s.rows) return;
  for (int i = 0; i < s.columns; ++i) y[row * s.columns + i] = x[row * s.columns + i];
}
// [row_a_thread]

// [column_a_thread]
__global__ void column_a_thread(Shape s, const float* x, float* y) {
  const int64_t column = cuda::thread_of_grid();
  if (column >= s.columns) return;
  for (int i = 0; i < s.rows; ++i)
    y[column + int64_t{i} * s.columns] = x[column + int64_t{i} * s.columns];
}
// [column_a_thread]

// [shifted]
/// Lanes read neighbors, from the second element on: 128 bytes that lie in five sectors.
__global__ void shifted(int64_t n, const float* x, float* y) {
  const int64_t thread = cuda::thread_of_grid();
  if (thread >= n) return;
  const int64_t i = thread + 1 < n ? thread + 1 : 0;
  y[i] = x[i];
}
// [shifted]

// [float4s]
__global__ void float4s(int64_t n, const float4* x, float4* y) {
  const int64_t i = cuda::thread_of_grid();
  if (i < n / 4) y[i] = x[i];
  const int64_t rest = n / 4 * 4 + i;
  if (rest < n) reinterpret_cast<float*>(y)[rest] = reinterpret_cast<const float*>(x)[rest];
}
// [float4s]

void run_rows(const cuda::Queue& queue, const Data& d) {
  launch(row_a_thread, blocks_for(d.shape.rows), kThreads, 0, queue, d.shape, d.x, d.y);
}
void run_columns(const cuda::Queue& queue, const Data& d) {
  launch(column_a_thread, blocks_for(d.shape.columns), kThreads, 0, queue, d.shape, d.x, d.y);
}
void run_shifted(const cuda::Queue& queue, const Data& d) {
  launch(shifted, blocks_for(d.shape.n()), kThreads, 0, queue, d.shape.n(), d.x, d.y);
}
void run_float4s(const cuda::Queue& queue, const Data& d) {
  launch(float4s, blocks_for(d.shape.n() / 4 + 1), kThreads, 0, queue, d.shape.n(),
         reinterpret_cast<const float4*>(d.x), reinterpret_cast<float4*>(d.y));
}

const Rung kRungs[] = {
    {"row_a_thread", "lanes are a row apart", 75,
     [](Shape s) -> Counts { return {.bytes = 2 * s.n() * kSector}; }, run_rows},
    {"column_a_thread", "lanes are neighbors", 75,
     [](Shape s) -> Counts {  // rows that begin within a sector: one more a warp
       const int64_t beyond = s.columns % 8 == 0 ? 0 : ceil_div(s.columns, kWarp) * kSector;
       return {.bytes = 2 * s.rows * (bytes_of(s.columns) + beyond)};
     },
     run_columns},
    {"shifted", "neighbors, one element later", 75,
     [](Shape s) -> Counts { return {.bytes = 2 * 5 * ceil_div(s.n(), kWarp) * kSector}; },
     run_shifted},
    {"float4s", "four neighbors in one access", 75,
     [](Shape s) -> Counts { return {.bytes = 2 * bytes_by_four(s.n())}; }, run_float4s},
};

}  // namespace

const Ideas kCoalescing{"coalescing", kRungs};

}  // namespace usp::ideas
