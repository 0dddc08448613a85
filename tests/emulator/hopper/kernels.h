#pragma once

#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/tensor_maps.h"

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

/// By TMA and mma.sync, from tiles that are swizzled or not.
void tma_product(const Product& x, bool swizzled);
/// y = x^T, 16 x 16, by ldmatrix and stmatrix.
void turn(const __nv_bfloat16* x, __nv_bfloat16* y);
/// Each row of 32 the other way round, by one warp for another.
void turn_rows(const float* x, float* y, int rows);
/// One warpgroup: c = a b^T, 64 x n x 64, a in registers, b matrix number `plane` of four; n is 64,
/// 128 or 256.
void registers_product(int n, int plane, const __nv_bfloat16* a, const __nv_bfloat16* b, float* c);
/// One warpgroup: c = a b^T, 64 x 64 x 64, a and b written to shared memory by threads, either of
/// them with m or n contiguous, swizzled over so many bytes or not at all (0).
void layout_product(int swizzle, bool a_mn, bool b_mn, const __nv_bfloat16* a,
                    const __nv_bfloat16* b, float* c);

/// A matrix in boxes, or several that follow each other.
template <class T>
cuda::Boxed boxed(const T* x, int rows, int columns, int pitch, int box_rows, int box_columns,
                  CUtensorMapSwizzle swizzle, int planes = 1) {
  return {x,      cuda::tensor_map_type(x), rows, columns, pitch, box_rows, box_columns, swizzle,
          planes, int64_t{rows} * pitch};
}

}  // namespace usp::hopper
