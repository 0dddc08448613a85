#pragma once

#include <cublasLt.h>

#include <compare>
#include <map>
#include <memory>

#include "cuda/cuda_backend.h"
#include "tensor/tensor.h"

namespace usp::cuda {

/// One operand of a product, or its result: `count` matrices of the same layout, `batch_stride`
/// elements from one to the next.
struct Matrices {
  Tensor first;  ///< [rows, columns], one axis contiguous
  int64_t count = 1, batch_stride = 0;

  Matrices(const Tensor& matrix) : first(matrix) {}  // NOLINT: a matrix is one of them
  Matrices(const Tensor& matrix, int64_t matrices, int64_t stride)
      : first(matrix), count(matrices), batch_stride(stride) {}
};

/// Matrix products by cuBLASLt, all on one stream. Products of f32 are in f32: no operand is
/// rounded to TF32. bf16 is multiplied by tensor cores, and summed in f32.
///
/// The library has hundreds of kernels and a heuristic that picks one for given sizes, layouts and
/// alignments. That takes longer than a small product, so a choice is kept for the run. Where it
/// has none, as may be for single rows or odd layouts, the operands are copied to where they are
/// aligned; where it has none for these either, a kernel of our own multiplies. Both are counted.
class MatmulLibrary {
 public:
  /// `detours` counts the products that it had no kernel for, and outlives it.
  MatmulLibrary(cudaStream_t stream, MatmulDetours& detours);
  ~MatmulLibrary();

  /// c = a b, or c += a b, for every matrix of the batch. There is something to multiply: no size
  /// is 0.
  void multiply(const Matrices& c, const Matrices& a, const Matrices& b, bool accumulate);
  /// c = addend + a b, where the library has a kernel for it and addend lies as c does; false: it
  /// does not, and nothing is written.
  bool multiply_onto(const Matrices& c, const Matrices& a, const Matrices& b,
                     const Matrices& addend);

 private:
  class Plan;

  /// How a matrix lies in memory, for a library that counts column by column: rows (or, transposed,
  /// columns) of ours are its columns, `leading` elements apart.
  struct Layout {
    bool transposed;
    int64_t leading, batch_stride;
    int alignment;  ///< bytes that divide every address, up to 16

    explicit Layout(const Matrices& x);
    auto operator<=>(const Layout&) const = default;
  };
  /// What a choice depends on.
  struct Problem {
    int64_t m, n, k, count;
    DType dtype, c_dtype;
    Layout a, b, c;

    auto operator<=>(const Problem&) const = default;
  };

  /// The plan for it; nullptr if the library has no kernel.
  Plan* find(const Matrices& c, const Matrices& a, const Matrices& b);
  void multiply_copies(const Matrices& c, const Matrices& a, const Matrices& b, bool accumulate);

  struct Kept {
    std::unique_ptr<Plan> plan;
    int64_t last_use = 0;
  };
  cudaStream_t stream_;
  cublasLtHandle_t library_ = nullptr;
  std::map<Problem, Kept> plans_;
  int64_t uses_ = 0;
  MatmulDetours& detours_;
};

}  // namespace usp::cuda
