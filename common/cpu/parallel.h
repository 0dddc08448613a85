#pragma once

#include <algorithm>

#include "runtime.h"
#include "tensor.h"

namespace usp::cpu {

/// Work, in elements, below which waking the other threads costs more than it saves.
inline constexpr int64_t kParallelWork = int64_t{1} << 15;

/// body(i) for every i in [0, count), `cost` elements of work each. The iterations run on any
/// thread in any order: body must not allocate, throw, or write what another iteration reads.
template <class Body>
void parallel_for(int64_t count, int64_t cost, Body body) {
  // A private copy of body lets the compiler keep what it captured in registers.
#pragma omp parallel for schedule(static) firstprivate(body) if (count * cost >= kParallelWork)
  for (int64_t i = 0; i < count; ++i) body(i);
}

/// The same for one element per iteration, in SIMD lanes.
template <class Body>
void parallel_for_elements(int64_t count, Body body) {
#pragma omp parallel for simd schedule(simd                                      \
                                       : static) firstprivate(body) if (parallel \
                                                                        : count >= kParallelWork)
  for (int64_t i = 0; i < count; ++i) body(i);
}

/// A temporary tensor, counted as workspace.
inline Tensor workspace(const Shape& shape, DType dtype) {
  const CategoryScope scope(Category::workspace);
  return Tensor::empty(shape, dtype);
}

/// The sum of block_sum(begin, end) over [0, count) cut into blocks of kSumBlock, in index order:
/// the same bits for any number of threads.
template <class BlockSum>
double sum_over_blocks(int64_t count, BlockSum block_sum) {
  constexpr int64_t kSumBlock = 4096;
  const int64_t blocks = (count + kSumBlock - 1) / kSumBlock;
  const Tensor partial_sums = workspace({blocks}, DType::f64);
  double* partial = partial_sums.data<double>();
  parallel_for(blocks, kSumBlock, [=](int64_t block) {
    partial[block] = block_sum(block * kSumBlock, std::min(count, (block + 1) * kSumBlock));
  });
  double sum = 0;
  for (int64_t block = 0; block < blocks; ++block) sum += partial[block];
  return sum;
}

}  // namespace usp::cpu
