#include "cuda/tensor_maps.h"

#include <algorithm>

#include "base/check.h"
#include "cuda/errors.h"

namespace usp::cuda {

namespace {

constexpr int64_t kUnit = 16;  // bytes: what copies of boxes count in
constexpr int kMostOfBox = 256;

int64_t bytes_of(CUtensorMapDataType type) {
  return type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? sizeof(float) : sizeof(__nv_bfloat16);
}

/// Bytes between which pieces change places; 0: nowhere.
int64_t width_of(CUtensorMapSwizzle swizzle) {
  return swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : int64_t{16} << swizzle;
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

void check_pitch(const char* name, int64_t pitch, int64_t least, int64_t bytes) {
  if (pitch >= least && pitch * bytes % kUnit == 0) return;
  usage_error(
      "tensor map: {}={} of elements of {} bytes must be at least {}, and a multiple of {} bytes; "
      "try {}",
      name, pitch, bytes, least, kUnit, round_up(std::max(pitch, least), kUnit / bytes));
}

/// What the driver would refuse without a word.
void check(const Boxed& x) {
  const int64_t bytes = bytes_of(x.type), inner = x.box_columns * bytes,
                width = width_of(x.swizzle);
  const auto address = reinterpret_cast<uintptr_t>(x.data);
  if (address % kUnit != 0) {
    usage_error(
        "tensor map: the address must be a multiple of {} bytes, and is {} beyond one; try "
        "to begin {} elements later",
        kUnit, address % kUnit, (kUnit - address % kUnit) / bytes);
  }
  if (x.rows < 1 || x.columns < 1 || x.planes < 1) {
    usage_error("tensor map: {} matrices of {} x {} must have an element; try 1 of 1 x 1", x.planes,
                x.rows, x.columns);
  }
  check_pitch("pitch", x.pitch, x.columns, bytes);
  if (x.planes > 1) check_pitch("plane_pitch", x.plane_pitch, x.rows * x.pitch, bytes);
  if (x.box_rows < 1 || x.box_rows > kMostOfBox) {
    usage_error("tensor map: box_rows={} must be 1 to {}; try {}", x.box_rows, kMostOfBox,
                kMostOfBox);
  }
  const int64_t most = width > 0 ? width / bytes : kMostOfBox;
  if (inner < kUnit || inner % kUnit != 0 || x.box_columns > most) {
    usage_error(
        "tensor map: box_columns={} of elements of {} bytes must be a multiple of {} bytes, "
        "and with this swizzle at most {}; try {}",
        x.box_columns, bytes, kUnit, most, most);
  }
}

/// The driver's function, which is in no library that a program is linked with.
auto* find_encoder() {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  USP_CUDA(cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &result));
#else
  USP_CUDA(cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess) {
    int driver = 0;
    USP_CUDA(cudaDriverGetVersion(&driver));
    usage_error(
        "tensor maps need a driver for CUDA 12.0 or later, and this one knows CUDA up to {}; try a "
        "newer driver, or kernels without copies of boxes",
        version_text(driver));
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

CUtensorMap encode(const Boxed& x) {
  const auto bytes = static_cast<cuuint64_t>(bytes_of(x.type));
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(x.columns), static_cast<cuuint64_t>(x.rows),
                              static_cast<cuuint64_t>(x.planes)};
  const cuuint64_t strides[] = {x.pitch * bytes, x.plane_pitch * bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(x.box_columns),
                            static_cast<cuuint32_t>(x.box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      find_encoder()(&map, x.type, x.planes > 1 ? 3 : 2, const_cast<void*>(x.data), sizes, strides,
                     box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, x.swizzle,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  USP_CHECK(result == CUDA_SUCCESS, "the driver makes no tensor map of {} x {}, pitch {}: error {}",
            x.rows, x.columns, x.pitch, static_cast<int>(result));
  return map;
}

}  // namespace

const CUtensorMap& TensorMaps::of(const Boxed& matrix) {
  const auto found = maps_.find(matrix);
  if (found != maps_.end()) return found->second;
  check(matrix);
  return maps_.emplace(matrix, encode(matrix)).first->second;
}

}  // namespace usp::cuda
