#pragma once

#include "cuda/hopper.h"

/// Kernels that use what Hopper has beside its threads, and what launches them. They compile for
/// GPUs as well.
namespace usp::hopper {

/// c = a b^T: a is m x k, b is n x k, rows `pitch` elements apart; c is m x n, rows `c_pitch`
/// apart.
struct Product {
  int m, n, k;
  const __nv_bfloat16 *a, *b;
  float* c;
  int pitch, c_pitch;
};

/// By TMA and wgmma; `by_tma`: so is c written.
cudaError_t wgmma_product(const Product& x, bool by_tma, int blocks);
/// By TMA and mma.sync, from tiles that are swizzled or not.
cudaError_t tma_product(const Product& x, bool swizzled);
/// By cp.async and mma.sync.
cudaError_t mma_product(const Product& x);
/// y = x^T, 16 x 16, by ldmatrix and stmatrix.
cudaError_t turn(const __nv_bfloat16* x, __nv_bfloat16* y);
/// Each row of 32 the other way round, by one warp for another.
cudaError_t turn_rows(const float* x, float* y, int rows);
/// One warpgroup: c = a b^T, 64 x n x 64, a in registers, b matrix number `plane` of four; n is 64,
/// 128 or 256.
cudaError_t registers_product(int n, int plane, const __nv_bfloat16* a, const __nv_bfloat16* b,
                              float* c);
/// One warpgroup: c = a b^T, 64 x 64 x 64, a and b written to shared memory by threads, either of
/// them with m or n contiguous, swizzled over so many bytes or not at all (0).
cudaError_t layout_product(int swizzle, bool a_mn, bool b_mn, const __nv_bfloat16* a,
                           const __nv_bfloat16* b, float* c);

inline CUtensorMapDataType data_type(const __nv_bfloat16*) {
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}
inline CUtensorMapDataType data_type(const float*) { return CU_TENSOR_MAP_DATA_TYPE_FLOAT32; }

/// A matrix in boxes, or several that follow each other. False if the driver refuses it.
template <class T>
bool encode(CUtensorMap* map, T* x, int rows, int columns, int pitch, int box_rows, int box_columns,
            CUtensorMapSwizzle swizzle, int planes = 1) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(planes)};
  const cuuint64_t strides[] = {pitch * sizeof(T), rows * pitch * sizeof(T)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows),
                            1};
  const cuuint32_t steps[] = {1, 1, 1};
  return cuTensorMapEncodeTiled(
             map, data_type(x), planes > 1 ? 3 : 2, const_cast<void*>(static_cast<const void*>(x)),
             sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class... P, class... A>
cudaError_t start(void (*kernel)(P...), dim3 grid, int threads, int shared_bytes,
                  const A&... arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace usp::hopper
