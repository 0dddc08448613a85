#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <compare>
#include <cstdint>
#include <map>

namespace usp::cuda {

/// A matrix, or several of one size, and the box of it that one copy takes: what a tensor map
/// describes. Lengths are in elements. What a box has beyond the matrix is zeros.
struct Boxed {
  const void* data = nullptr;
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int64_t rows = 0, columns = 0;
  int64_t pitch = 0;  ///< from a row to the next
  int box_rows = 0, box_columns = 0;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  int64_t planes = 1;
  int64_t plane_pitch = 0;  ///< from a matrix to the next

  auto operator<=>(const Boxed&) const = default;
};

/// What a tensor map calls the type of these elements.
inline CUtensorMapDataType tensor_map_type(const __nv_bfloat16*) {
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}
/// The same for f32.
inline CUtensorMapDataType tensor_map_type(const float*) { return CU_TENSOR_MAP_DATA_TYPE_FLOAT32; }

/// Tensor maps, each made once: what a map says depends on nothing but its Boxed.
class TensorMaps {
 public:
  /// Throws UsageError where copies of boxes cannot take the matrix, or the driver makes no maps.
  const CUtensorMap& of(const Boxed& matrix);

  /// How many there are.
  int64_t made() const { return static_cast<int64_t>(maps_.size()); }

 private:
  std::map<Boxed, CUtensorMap> maps_;  ///< whose addresses stay
};

}  // namespace usp::cuda
