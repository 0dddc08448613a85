#pragma once

#include "cuda/reduce.h"
#include "fragments.h"

/// What the rungs for Hopper share: two groups of threads multiply, and one thread of a third
/// brings boxes of 64 channels.
namespace usp::attention {

inline constexpr int kGroup = 128, kGroups = 2, kBlock = kGroup * (kGroups + 1);

/// Is this the thread that speaks for its group?
__device__ inline bool is_first_of_group() { return threadIdx.x % kGroup == 0; }

/// `rows` rows of an operand from `row` on, channels from `column` on: for `full`, which expects
/// them.
template <int width, int rows>
__device__ void bring_boxes(char* to, const CUtensorMap& map, cuda::Barrier* full, const Shape& x,
                            int sample, int row, int column) {
  for (int panel = 0; panel < width / kDepth; ++panel) {
    char* const box = to + panel * rows * kRowBytes;
    const int channel = column + panel * kDepth;
    if (x.samples == 1) cuda::tma_load_2d(box, &map, full, channel, row);
    if (x.samples > 1) cuda::tma_load_3d(box, &map, full, channel, row, sample);
  }
}

/// Map of an operand, [samples, rows, channels] of all heads, in boxes of `box_rows` rows.
inline CUtensorMap map_of(const Problem<bf16>& p, const bf16* x, int rows, int heads,
                          const Pitch& pitch, int box_rows) {
  return p.maps->of({x, cuda::tensor_map_type(x), rows, heads * pitch.head, pitch.row, box_rows,
                     kDepth, CU_TENSOR_MAP_SWIZZLE_128B, p.samples, pitch.sample});
}

}  // namespace usp::attention
