/// cuBLASLt: refuses what the library refuses, computes with plain loops when the stream gets
/// there.

#include "cublas.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <utility>

#include "streams.h"

namespace usp::emulator {
namespace {

using Layout = cublasLtMatrixLayoutOpaque_t;
constexpr size_t kWorkspaceBytes = 4096;  // of the algorithm that large products get

size_t bytes_of(cudaDataType_t type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

/// One matrix of the batch, as rows and columns whatever its order.
struct Matrix {
  explicit Matrix(const Layout& layout)
      : type(layout.type),
        rows(layout.rows),
        cols(layout.cols),
        row_stride(layout.order == CUBLASLT_ORDER_ROW ? layout.ld : 1),
        col_stride(layout.order == CUBLASLT_ORDER_ROW ? 1 : layout.ld) {}
  void transpose() {
    std::swap(rows, cols);
    std::swap(row_stride, col_stride);
  }

  cudaDataType_t type;
  int64_t rows, cols, row_stride, col_stride;
};

template <class T, class U>
void read(const Matrix& matrix, const void* address, std::vector<U>& values) {
  const T* elements = static_cast<const T*>(address);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.cols; ++j) {
      values[i * matrix.cols + j] =
          static_cast<U>(elements[i * matrix.row_stride + j * matrix.col_stride]);
    }
  }
}

/// Elements row by row, in the type that is computed in.
template <class U>
std::vector<U> values_of(const Matrix& matrix, const void* address) {
  std::vector<U> values(matrix.rows * matrix.cols);
  if (matrix.type == CUDA_R_64F) read<double>(matrix, address, values);
  if (matrix.type == CUDA_R_32F) read<float>(matrix, address, values);
  if (matrix.type == CUDA_R_16BF) read<__nv_bfloat16>(matrix, address, values);
  return values;
}

template <class T, class U>
void write(const Matrix& matrix, const std::vector<U>& values, void* address) {
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.cols; ++j) {
      static_cast<T*>(address)[i * matrix.row_stride + j * matrix.col_stride] =
          static_cast<T>(values[i * matrix.cols + j]);
    }
  }
}

/// Device memory that a call names, checked line by line.
template <class F>
void each_line(const Layout& layout, const void* base, int batch, F visit) {
  const bool by_row = layout.order == CUBLASLT_ORDER_ROW;
  const size_t size = bytes_of(layout.type);
  const char* first = static_cast<const char*>(base) + batch * layout.batch_offset * int64_t(size);
  const int64_t lines = by_row ? layout.rows : layout.cols;
  for (int64_t line = 0; line < lines; ++line) {
    visit(first + line * layout.ld * int64_t(size), (by_row ? layout.cols : layout.rows) * size);
  }
}

struct Product {
  const void* place;  // of the call
  cublasLtMatmulDescOpaque_t desc;
  Layout a, b, c, d;
  const void *A, *B, *C;
  void *D, *workspace;
  size_t workspace_bytes;
  double alpha, beta;
  bool in_parts = false;  // rounded to bf16 before they are added
};

template <class U>
U rounded(U value) {
  return static_cast<U>(static_cast<float>(__nv_bfloat16(static_cast<float>(value))));
}

/// Accumulates in U, one accumulator for each output, k ascending.
template <class U>
void multiply(const Product& product, int batch) {
  const auto at = [batch](const void* base, const Layout& layout) {
    return static_cast<const char*>(base) +
           batch * layout.batch_offset * int64_t(bytes_of(layout.type));
  };
  Matrix a(product.a), b(product.b), d(product.d);
  if (product.desc.transa != CUBLAS_OP_N) a.transpose();
  if (product.desc.transb != CUBLAS_OP_N) b.transpose();
  const std::vector<U> left = values_of<U>(a, at(product.A, product.a));
  const std::vector<U> right = values_of<U>(b, at(product.B, product.b));
  std::vector<U> out(d.rows * d.cols);
  for (int64_t i = 0; i < d.rows; ++i) {
    U* row = out.data() + i * d.cols;
    std::vector<U> first(product.in_parts ? d.cols : 0);  // of two parts
    for (int64_t k = 0; k < a.cols; ++k) {
      if (product.in_parts && k == a.cols / 2) {
        for (int64_t j = 0; j < d.cols; ++j) first[j] = rounded(std::exchange(row[j], U{0}));
      }
      const U factor = left[i * a.cols + k];
      const U* other = right.data() + k * d.cols;
      for (int64_t j = 0; j < d.cols; ++j) row[j] += factor * other[j];
    }
    for (size_t j = 0; j < first.size(); ++j) row[j] = first[j] + rounded(row[j]);
  }
  for (U& value : out) value *= static_cast<U>(product.alpha);
  if (product.beta != 0) {
    const std::vector<U> before = values_of<U>(Matrix(product.c), at(product.C, product.c));
    for (size_t i = 0; i < out.size(); ++i) out[i] += static_cast<U>(product.beta) * before[i];
  }
  void* to = const_cast<char*>(at(product.D, product.d));
  if (d.type == CUDA_R_64F) write<double>(d, out, to);
  if (d.type == CUDA_R_32F) write<float>(d, out, to);
  if (d.type == CUDA_R_16BF) write<__nv_bfloat16>(d, out, to);
}

/// False, after reporting it, if the product would leave its blocks of memory.
bool check_memory(const Product& product, int batch) {
  bool inside = true;
  const auto reads = [](const char* line, size_t bytes) {
    check_read(line, bytes, "cublasLtMatmul");
    check_call(line, bytes, false);
  };
  each_line(product.a, product.A, batch, reads);
  each_line(product.b, product.B, batch, reads);
  if (product.beta != 0) each_line(product.c, product.C, batch, reads);
  const auto within = [&](const char* line, size_t bytes) { inside &= is_allocated(line, bytes); };
  each_line(product.a, product.A, batch, within);
  each_line(product.b, product.B, batch, within);
  if (product.beta != 0) each_line(product.c, product.C, batch, within);
  each_line(product.d, product.D, batch, within);
  if (!inside) problem("out of bounds", "cublasLtMatmul leaves its blocks of memory", nullptr);
  return inside;
}

void run(const Product& product) {
  begin_call({"cublasLtMatmul", product.place});
  if (product.workspace_bytes > 0) {
    check_call(product.workspace, product.workspace_bytes, true);
    std::memset(product.workspace, 0xff, product.workspace_bytes);
  }
  for (int batch = 0; batch < product.d.batches; ++batch) {
    if (!check_memory(product, batch)) return;
    if (product.desc.scale == CUDA_R_64F) {
      multiply<double>(product, batch);
    } else {
      multiply<float>(product, batch);
    }
    each_line(product.d, product.D, batch, [](const char* line, size_t bytes) {
      check_call(line, bytes, true);
      allocation_at(line)->set_initialised(line, bytes, true);
    });
  }
}

/// The types that go together: all f64; all f32; bf16 in, bf16 or f32 out.
bool types_fit(const cublasLtMatmulDescOpaque_t& desc, const Layout& a, const Layout& b,
               const Layout& c, const Layout& d) {
  if (a.type != b.type || c.type != d.type) return false;
  const bool f64 =
      desc.compute == CUBLAS_COMPUTE_64F || desc.compute == CUBLAS_COMPUTE_64F_PEDANTIC;
  if (f64) return a.type == CUDA_R_64F && d.type == CUDA_R_64F && desc.scale == CUDA_R_64F;
  if (desc.scale != CUDA_R_32F || (d.type != CUDA_R_32F && d.type != CUDA_R_16BF)) return false;
  if (a.type == CUDA_R_32F) return d.type == CUDA_R_32F;
  return a.type == CUDA_R_16BF && desc.compute != CUBLAS_COMPUTE_32F_FAST_TF32;
}

bool layout_fits(const Layout& layout, int batches) {
  const uint64_t line = layout.order == CUBLASLT_ORDER_ROW ? layout.cols : layout.rows;
  return layout.rows > 0 && layout.cols > 0 && layout.ld >= static_cast<int64_t>(line) &&
         layout.batches == batches && batches > 0;
}

cublasStatus_t check(const cublasLtMatmulDescOpaque_t& desc, const Layout& a, const Layout& b,
                     const Layout& c, const Layout& d) {
  for (const Layout* layout : {&a, &b, &c, &d}) {
    if (!layout_fits(*layout, d.batches)) return CUBLAS_STATUS_INVALID_VALUE;
  }
  Matrix left(a), right(b);
  if (desc.transa != CUBLAS_OP_N) left.transpose();
  if (desc.transb != CUBLAS_OP_N) right.transpose();
  if (left.cols != right.rows || left.rows != int64_t(d.rows) || right.cols != int64_t(d.cols) ||
      c.rows != d.rows || c.cols != d.cols || c.order != d.order) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const bool supported = types_fit(desc, a, b, c, d) &&
                         desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT &&
                         desc.pointers == CUBLASLT_POINTER_MODE_HOST;
  return supported ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

double scalar(const void* value, cudaDataType_t type) {
  return type == CUDA_R_64F ? *static_cast<const double*>(value)
                            : *static_cast<const float*>(value);
}

}  // namespace
}  // namespace usp::emulator

using namespace usp::emulator;

// An algorithm's data: the bytes of workspace, then the alignments of A, B, C, D; whether it adds
// up parts; the last marks it.
constexpr uint64_t kAlgorithm = 0xa160;
constexpr uint64_t kDeep = 64;  // products that are cut in two where that is allowed

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B,
                                              cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* returned) {
  *returned = 0;
  if (handle == nullptr || requested <= 0) return CUBLAS_STATUS_INVALID_VALUE;
  const cublasStatus_t status = check(*desc, *A, *B, *C, *D);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const uint64_t depth = desc->transa == CUBLAS_OP_N ? A->cols : A->rows;
  const uint32_t* alignments = preference->alignment;
  if (options.cublas_lacks != nullptr &&
      options.cublas_lacks({int64_t(D->rows), int64_t(D->cols), int64_t(depth), A->type,
                            *std::min_element(alignments, alignments + 4)})) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  results[0] = {};
  results[0].workspaceSize = preference->workspace_bytes < kWorkspaceBytes ? 0 : kWorkspaceBytes;
  results[0].wavesCount = 1;
  uint64_t* data = results[0].algo.data;
  data[0] = results[0].workspaceSize;
  std::copy_n(alignments, 4, data + 1);
  constexpr uint32_t kRounding =
      CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  data[5] = (preference->reductions & kRounding) != 0 && D->type == CUDA_R_16BF && depth >= kDeep;
  data[7] = kAlgorithm;
  *returned = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t Adesc, const void* B,
                              cublasLtMatrixLayout_t Bdesc, const void* beta, const void* C,
                              cublasLtMatrixLayout_t Cdesc, void* D, cublasLtMatrixLayout_t Ddesc,
                              const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  const Locked locked(lock());
  if (handle == nullptr || ready() != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  const cublasStatus_t status = check(*desc, *Adesc, *Bdesc, *Cdesc, *Ddesc);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (!is_stream(stream) || !of_this_device(stream, "a product"))
    return CUBLAS_STATUS_INVALID_VALUE;
  const void* operands[] = {A, B, C, D};
  const Layout* layouts[] = {Adesc, Bdesc, Cdesc, Ddesc};
  for (int i = 0; i < 4; ++i) {
    const size_t alignment = algo != nullptr ? algo->data[1 + i] : bytes_of(layouts[i]->type);
    if (!is_device(operands[i]) || reinterpret_cast<uintptr_t>(operands[i]) % alignment != 0) {
      return CUBLAS_STATUS_INVALID_VALUE;
    }
  }
  const size_t needed = algo != nullptr ? algo->data[0] : 0;
  if ((algo != nullptr && algo->data[7] != kAlgorithm) || workspace_bytes < needed ||
      (needed > 0 &&
       (!is_allocated(workspace, needed) || reinterpret_cast<uintptr_t>(workspace) % 16 != 0))) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  enqueue(
      stream, Ddesc->rows * Ddesc->cols * Ddesc->batches,
      [product = Product{USP_PLACE, *desc, *Adesc, *Bdesc, *Cdesc, *Ddesc, A, B, C, D, workspace,
                         needed, scalar(alpha, desc->scale), scalar(beta, desc->scale),
                         algo != nullptr && algo->data[5] != 0}] { run(product); });
  return CUBLAS_STATUS_SUCCESS;
}
