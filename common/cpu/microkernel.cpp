#include "cpu/microkernel.h"

// Compiled with -ffp-contract=fast: the products and sums below become fused multiply-adds.
namespace usp::cpu {

template <class A>
void multiply_tile(int64_t depth, const A* a, int64_t a_row, const A* panel, A* c, int64_t c_row,
                   bool accumulate, int64_t a_column) {
  constexpr int64_t kRows = kTileRows<A>;
  typedef A Vector __attribute__((vector_size(kVectorBytes), aligned(alignof(A)), may_alias));
  const auto row_of_c = [=](int64_t i) { return reinterpret_cast<Vector*>(c + i * c_row); };

  Vector sum[kRows][2] = {};
  if (accumulate) {
#pragma GCC unroll 6
    for (int64_t i = 0; i < kRows; ++i) {
      sum[i][0] = row_of_c(i)[0];
      sum[i][1] = row_of_c(i)[1];
    }
  }
  // Two row pointers, for rows 0-2 and 3-5: each address is then base + {0, 1, 2} * a_row, which
  // one x86 instruction can express.
  const A* rows[2] = {a, a + 3 * a_row};
  const Vector* b = reinterpret_cast<const Vector*>(panel);
  for (int64_t k = 0; k < depth; ++k, b += 2) {
    const Vector b0 = b[0], b1 = b[1];
#pragma GCC unroll 6
    for (int64_t i = 0; i < kRows; ++i) {
      const A x = rows[i / 3][i % 3 * a_row];
      sum[i][0] += x * b0;
      sum[i][1] += x * b1;
    }
    rows[0] += a_column;
    rows[1] += a_column;
  }
#pragma GCC unroll 6
  for (int64_t i = 0; i < kRows; ++i) {
    row_of_c(i)[0] = sum[i][0];
    row_of_c(i)[1] = sum[i][1];
  }
}

template void multiply_tile(int64_t, const float*, int64_t, const float*, float*, int64_t, bool,
                            int64_t);
template void multiply_tile(int64_t, const double*, int64_t, const double*, double*, int64_t, bool,
                            int64_t);

}  // namespace usp::cpu
