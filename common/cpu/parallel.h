#pragma once

#include <algorithm>

#include "base/threads.h"
#include "tensor/runtime.h"
#include "tensor/tensor.h"

namespace usp::cpu {

/// Work, in elements, below which waking the other threads costs more than it saves.
inline constexpr int64_t kParallelWork = int64_t{1} << 15;
/// Elements that one iteration takes where elements are the only thing to iterate over.
inline constexpr int64_t kBlock = 4096;

/// body(i) for every i in [0, count), `cost` elements of work each. The iterations run on any
/// thread in any order: body must not allocate, throw, or write what another iteration reads.
/// Threads take them in small portions: cores differ in speed, by design or by what else they run.
template <class Body>
void parallel_for(int64_t count, int64_t cost, Body body) {
  [[maybe_unused]] const int64_t portion = std::max<int64_t>(1, count / (32 * num_threads()));
  // A private copy of body lets the compiler keep what it captured in registers.
#pragma omp parallel for schedule(dynamic, portion) \
    firstprivate(body) if (count * cost >= kParallelWork)
  for (int64_t i = 0; i < count; ++i) body(i);
}

/// The same for one element per iteration, in SIMD lanes.
template <class Body>
void parallel_for_elements(int64_t count, Body body) {
  parallel_for((count + kBlock - 1) / kBlock, kBlock, [=](int64_t block) {
    const int64_t end = std::min(count, (block + 1) * kBlock);
#pragma omp simd
    for (int64_t i = block * kBlock; i < end; ++i) body(i);
  });
}

/// A temporary tensor, counted as workspace.
inline Tensor workspace(const Shape& shape, DType dtype) {
  const CategoryScope scope(Category::workspace);
  return Tensor::empty(shape, dtype);
}

/// An array of `size` elements for each thread.
template <class A>
class PerThread {
 public:
  explicit PerThread(int64_t size)
      : storage_(workspace({num_threads(), size}, dtype_of<A>)), size_(size) {}
  /// The calling thread's.
  A* mine() const { return static_cast<A*>(storage_.address()) + thread_index() * size_; }

 private:
  Tensor storage_;
  int64_t size_;
};

/// The sum of block_sum(begin, end) over [0, count) cut into blocks, in index order:
/// the same bits for any number of threads.
template <class BlockSum>
double sum_over_blocks(int64_t count, BlockSum block_sum) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  const Tensor partial_sums = workspace({blocks}, DType::f64);
  double* partial = partial_sums.data<double>();
  parallel_for(blocks, kBlock, [=](int64_t block) {
    partial[block] = block_sum(block * kBlock, std::min(count, (block + 1) * kBlock));
  });
  double sum = 0;
  for (int64_t block = 0; block < blocks; ++block) sum += partial[block];
  return sum;
}

}  // namespace usp::cpu
