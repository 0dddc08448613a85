/// The functions of cuBLASLt that products need, in the place of the library itself. It has half a
/// gigabyte, which a program that runs on the CPU should not load, and a machine without it should
/// not refuse to start the program. So it is opened when the first of them is called.
#include <cublasLt.h>
#include <cublas_api.h>

#include "base/check.h"
#include "cuda/loaded/forward.h"

namespace usp::cuda {

namespace {

void* cublas_lt() {
  static void* const opened = open_library(fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR),
                                           "device=cuda", "--device cpu");
  return opened;
}

}  // namespace

}  // namespace usp::cuda

#define USP_FORWARD_CALL(NAME, PARAMETERS, ARGUMENTS) \
  USP_FORWARD(usp::cuda::cublas_lt, cublasStatus_t, NAME, PARAMETERS, ARGUMENTS)

USP_FORWARD(usp::cuda::cublas_lt, const char*, cublasLtGetStatusString, (cublasStatus_t status),
            (status))
USP_FORWARD(usp::cuda::cublas_lt, size_t, cublasLtGetVersion, (), ())
USP_FORWARD_CALL(cublasLtCreate, (cublasLtHandle_t * handle), (handle))
USP_FORWARD_CALL(cublasLtDestroy, (cublasLtHandle_t handle), (handle))
USP_FORWARD_CALL(cublasLtMatmulDescCreate,
                 (cublasLtMatmulDesc_t * description, cublasComputeType_t compute,
                  cudaDataType_t scale),
                 (description, compute, scale))
USP_FORWARD_CALL(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t description), (description))
USP_FORWARD_CALL(cublasLtMatmulDescSetAttribute,
                 (cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute,
                  const void* value, size_t bytes),
                 (description, attribute, value, bytes))
USP_FORWARD_CALL(cublasLtMatrixLayoutCreate,
                 (cublasLtMatrixLayout_t * layout, cudaDataType type, uint64_t rows,
                  uint64_t columns, int64_t stride),
                 (layout, type, rows, columns, stride))
USP_FORWARD_CALL(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout), (layout))
USP_FORWARD_CALL(cublasLtMatrixLayoutSetAttribute,
                 (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                  const void* value, size_t bytes),
                 (layout, attribute, value, bytes))
USP_FORWARD_CALL(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * preference),
                 (preference))
USP_FORWARD_CALL(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t preference),
                 (preference))
USP_FORWARD_CALL(cublasLtMatmulPreferenceSetAttribute,
                 (cublasLtMatmulPreference_t preference,
                  cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t bytes),
                 (preference, attribute, value, bytes))
USP_FORWARD_CALL(cublasLtMatmulAlgoGetHeuristic,
                 (cublasLtHandle_t handle, cublasLtMatmulDesc_t description,
                  cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                  cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int asked,
                  cublasLtMatmulHeuristicResult_t results[], int* found),
                 (handle, description, a, b, c, d, preference, asked, results, found))
USP_FORWARD_CALL(cublasLtMatmul,
                 (cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void* alpha,
                  const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                  cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                  cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                  const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                  cudaStream_t stream),
                 (handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d,
                  d_layout, algorithm, workspace, workspace_bytes, stream))
