#include <cublasLt.h>
#include <cuda_bf16.h>

#include <random>

#include "catch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"

using namespace usp::emulator;
using test::Array;

namespace {

/// One matrix operand: a batch of rows x cols with room around it.
struct Operand {
  cudaDataType type;
  int rows, cols, ld;
  cublasLtOrder_t order = CUBLASLT_ORDER_COL;
  int batches = 1;

  int stride() const { return ld * (order == CUBLASLT_ORDER_COL ? cols : rows) + 16; }
  int at(int batch, int i, int j) const {
    return batch * stride() + (order == CUBLASLT_ORDER_COL ? i + j * ld : i * ld + j);
  }
};

struct Layout {
  explicit Layout(const Operand& operand) {
    cublasLtMatrixLayoutCreate(&handle, operand.type, operand.rows, operand.cols, operand.ld);
    const int32_t order = operand.order, batches = operand.batches;
    const int64_t offset = operand.stride();
    set(CUBLASLT_MATRIX_LAYOUT_ORDER, order);
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batches);
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, offset);
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(handle); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  template <class T>
  void set(cublasLtMatrixLayoutAttribute_t attribute, T value) {
    REQUIRE(cublasLtMatrixLayoutSetAttribute(handle, attribute, &value, sizeof(value)) ==
            CUBLAS_STATUS_SUCCESS);
  }

  cublasLtMatrixLayout_t handle;
};

struct Setup {
  Setup(cublasComputeType_t compute, cudaDataType scale, int32_t transa, int32_t transb) {
    REQUIRE(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    cublasLtMatmulDescCreate(&desc, compute, scale);
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transa, sizeof(transa));
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &transb, sizeof(transb));
    cublasLtMatmulPreferenceCreate(&preference);
    const uint64_t most = 1 << 20;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &most, sizeof(most));
  }
  ~Setup() {
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(handle);
  }
  Setup(const Setup&) = delete;
  Setup& operator=(const Setup&) = delete;

  cublasStatus_t choose(const Operand& a, const Operand& b, const Operand& d) {
    const Layout A(a), B(b), D(d);
    int count = 0;
    return cublasLtMatmulAlgoGetHeuristic(handle, desc, A.handle, B.handle, D.handle, D.handle,
                                          preference, 1, &result, &count);
  }
  template <class Scale>
  cublasStatus_t multiply(Scale alpha, Scale beta, const Operand& a, const void* A,
                          const Operand& b, const void* B, const Operand& d, void* D) {
    const Layout left(a), right(b), out(d);
    return cublasLtMatmul(handle, desc, &alpha, A, left.handle, B, right.handle, &beta, D,
                          out.handle, D, out.handle, &result.algo, workspace, result.workspaceSize,
                          nullptr);
  }

  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t desc;
  cublasLtMatmulPreference_t preference;
  cublasLtMatmulHeuristicResult_t result{};
  Array<char> workspace{1 << 20};
};

/// Multiplies random matrices and compares each element with its definition.
template <class In, class Out, class Scale>
void compare(cudaDataType in, cudaDataType out, cublasComputeType_t compute, cudaDataType scale,
             bool transa, bool transb, cublasLtOrder_t order, double tolerance) {
  const int m = 5, n = 7, k = 9, batches = 2;
  Operand a{in, m, k, 12, CUBLASLT_ORDER_COL, batches},
      b{in, k, n, 13, CUBLASLT_ORDER_COL, batches};
  if (transa) std::swap(a.rows, a.cols);
  if (transb) std::swap(b.rows, b.cols);
  const Operand d{out, m, n, 8, order, batches};
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<In> A(batches * a.stride()), B(batches * b.stride());
  std::vector<Out> D(batches * d.stride());
  for (In& value : A) value = static_cast<In>(normal(random));
  for (In& value : B) value = static_cast<In>(normal(random));
  for (Out& value : D) value = static_cast<Out>(normal(random));
  const Array<In> dA(A), dB(B);
  const Array<Out> dD(D);

  Setup setup(compute, scale, transa, transb);
  REQUIRE(setup.choose(a, b, d) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(setup.multiply<Scale>(2, 0.5, a, dA, b, dB, d, dD) == CUBLAS_STATUS_SUCCESS);
  const std::vector<Out> got = dD.host();
  std::vector<bool> written(got.size());
  for (int batch = 0; batch < batches; ++batch) {
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double sum = 0;
        for (int l = 0; l < k; ++l) {
          sum += static_cast<double>(A[transa ? a.at(batch, l, i) : a.at(batch, i, l)]) *
                 static_cast<double>(B[transb ? b.at(batch, j, l) : b.at(batch, l, j)]);
        }
        const int at = d.at(batch, i, j);
        const double expected = 2 * sum + 0.5 * static_cast<double>(D[at]);
        REQUIRE(std::abs(static_cast<double>(got[at]) - expected) <=
                tolerance * (1 + std::abs(expected)));
        written[at] = true;
      }
    }
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (!written[i]) REQUIRE(static_cast<double>(got[i]) == static_cast<double>(D[i]));
  }
  REQUIRE(take_report().problems.empty());
}

}  // namespace

TEST_CASE("cublasLt multiplies what is transposed, strided and batched") {
  for (const bool transa : {false, true}) {
    for (const bool transb : {false, true}) {
      for (const cublasLtOrder_t order : {CUBLASLT_ORDER_COL, CUBLASLT_ORDER_ROW}) {
        compare<double, double, double>(CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F, CUDA_R_64F,
                                        transa, transb, order, 1e-14);
        compare<float, float, float>(CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, CUDA_R_32F, transa,
                                     transb, order, 1e-5);
        compare<__nv_bfloat16, __nv_bfloat16, float>(CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F,
                                                     CUDA_R_32F, transa, transb, order, 4e-3);
        compare<__nv_bfloat16, float, float>(CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F,
                                             CUDA_R_32F, transa, transb, order, 1e-5);
      }
    }
  }
}

TEST_CASE("cublasLt refuses what does not fit") {
  const Operand a{CUDA_R_32F, 4, 6, 4}, b{CUDA_R_32F, 6, 8, 6}, d{CUDA_R_32F, 4, 8, 4};
  Setup setup(CUBLAS_COMPUTE_32F, CUDA_R_32F, CUBLAS_OP_N, CUBLAS_OP_N);
  REQUIRE(setup.choose(a, b, d) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(setup.choose({CUDA_R_32F, 4, 6, 3}, b, d) == CUBLAS_STATUS_INVALID_VALUE);  // ld
  REQUIRE(setup.choose(a, {CUDA_R_32F, 5, 8, 6}, d) == CUBLAS_STATUS_INVALID_VALUE);  // k
  REQUIRE(setup.choose(a, b, {CUDA_R_32F, 4, 7, 4}) == CUBLAS_STATUS_INVALID_VALUE);  // n
  Operand batched = a;
  batched.batches = 2;
  REQUIRE(setup.choose(batched, b, d) == CUBLAS_STATUS_INVALID_VALUE);
  REQUIRE(setup.choose({CUDA_R_16BF, 4, 6, 4}, b, d) == CUBLAS_STATUS_NOT_SUPPORTED);
  REQUIRE(setup.choose(a, b, {CUDA_R_16BF, 4, 8, 4}) == CUBLAS_STATUS_NOT_SUPPORTED);

  const Array<float> A(std::vector<float>(100, 1)), B(std::vector<float>(100, 1)), D(100);
  REQUIRE(setup.choose(a, b, d) == CUBLAS_STATUS_SUCCESS);
  const auto multiply = [&](const float* left) {
    return setup.multiply<float>(1, 0, a, left, b, B, d, D);
  };
  REQUIRE(multiply(A) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(multiply(A + 1) == CUBLAS_STATUS_INVALID_VALUE);  // promised 256 bytes
  float on_host[100];
  REQUIRE(multiply(on_host) == CUBLAS_STATUS_INVALID_VALUE);
  setup.result.workspaceSize = 0;
  REQUIRE(multiply(A) == CUBLAS_STATUS_INVALID_VALUE);
  REQUIRE(D.host()[0] == 6);
}

TEST_CASE("cublasLt reads what is written and inside its blocks") {
  const Operand a{CUDA_R_32F, 4, 4, 4};
  Setup setup(CUBLAS_COMPUTE_32F, CUDA_R_32F, CUBLAS_OP_N, CUBLAS_OP_N);
  REQUIRE(setup.choose(a, a, a) == CUBLAS_STATUS_SUCCESS);
  const Array<float> A(std::vector<float>(16, 1)), unwritten(16), short_by_one(15);
  const auto multiply = [&](const float* left, float* out) {
    REQUIRE(setup.multiply<float>(1, 0, a, left, a, A, a, out) == CUBLAS_STATUS_SUCCESS);
    return take_report();
  };
  REQUIRE(multiply(unwritten, A).has("uninitialised"));
  REQUIRE(multiply(A, short_by_one).has("out of bounds"));
  REQUIRE(multiply(A, unwritten).problems.empty());
  // A beta of 0 means that C is not read; another that it is.
  const Array<float> fresh(16);
  REQUIRE(setup.multiply<float>(1, 1, a, A, a, A, a, fresh) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(take_report().has("uninitialised"));
}
