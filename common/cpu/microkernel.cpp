#include "microkernel.h"

namespace usp::cpu {

template <class T>
void multiply_tile(int64_t depth, const T* a, int64_t a_row, int64_t a_column, const T* panel, T* c,
                   int64_t c_row, bool accumulate) {
  typedef T Vector __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));
  const auto at = [](auto* pointer) { return reinterpret_cast<Vector*>(pointer); };

  Vector sum[kTileRows][2] = {};
  if (accumulate) {
#pragma GCC unroll 6
    for (int64_t i = 0; i < kTileRows; ++i) {
      sum[i][0] = *at(c + i * c_row);
      sum[i][1] = *at(c + i * c_row + kLanes);
    }
  }
  // Two row pointers, for rows 0-2 and 3-5: each address is then base + {0, 1, 2} * a_row, which
  // one x86 instruction can express.
  const T* rows[2] = {a, a + 3 * a_row};
  for (int64_t k = 0; k < depth; ++k) {
    const Vector b0 = *reinterpret_cast<const Vector*>(panel);
    const Vector b1 = *reinterpret_cast<const Vector*>(panel + kLanes);
#pragma GCC unroll 6
    for (int64_t i = 0; i < kTileRows; ++i) {
      const T x = rows[i / 3][i % 3 * a_row];
      sum[i][0] += x * b0;
      sum[i][1] += x * b1;
    }
    rows[0] += a_column;
    rows[1] += a_column;
    panel += 2 * kLanes;
  }
#pragma GCC unroll 6
  for (int64_t i = 0; i < kTileRows; ++i) {
    *at(c + i * c_row) = sum[i][0];
    *at(c + i * c_row + kLanes) = sum[i][1];
  }
}

template void multiply_tile(int64_t, const float*, int64_t, int64_t, const float*, float*, int64_t,
                            bool);
template void multiply_tile(int64_t, const double*, int64_t, int64_t, const double*, double*,
                            int64_t, bool);

}  // namespace usp::cpu
