#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd.h"

namespace usp::cpu {

/// The tile of c that multiply_tile() keeps in registers: 6 rows of two SIMD vectors are 12
/// accumulators, which hide the latency of a multiply-add and leave 4 of 16 registers for a and b.
template <class A>
inline constexpr int64_t kTileRows = 6;
template <class A>
inline constexpr int64_t kTileColumns = 2 * kVectorBytes / int64_t{sizeof(A)};
/// The depth is a multiple of this.
template <class A>
inline constexpr int64_t kTileDepth = 1;

/// Tile of bf16: two by two of the CPU's matrix registers (AMX), which hold 16 rows of 64 bytes.
template <>
inline constexpr int64_t kTileRows<bf16> = 32;
template <>
inline constexpr int64_t kTileColumns<bf16> = 32;
template <>
inline constexpr int64_t kTileDepth<bf16> = 32;

/// What elements T are multiplied as. bf16 stays bf16 where the CPU has instructions for it, and
/// where a test asks for it, which then takes the long way.
#if defined(__AVX512BF16__) || defined(USP_MULTIPLY_BF16)
template <class T>
using operand_t = T;
#else
template <class T>
using operand_t = accumulate_t<T>;
#endif

/// c [kTileRows, kTileColumns] = or += a [kTileRows, depth] panel [depth, kTileColumns]. Row i of a
/// begins at a + i * a_row, its elements are a_column apart; the panel is contiguous; rows of c are
/// c_row apart. A is float or double. Every element is one sum in index order, so splitting the
/// depth over several accumulating calls gives the same bits.
template <class A>
void multiply_tile(int64_t depth, const A* a, int64_t a_row, const A* panel, A* c, int64_t c_row,
                   bool accumulate, int64_t a_column = 1);

/// The same for bf16, summed in f32. The instructions multiply pairs: c[i][j] += a[i][2k] b[2k][j]
/// + a[i][2k + 1] b[2k + 1][j]. In a panel the two b's stand side by side, [depth / 2,
/// kTileColumns, 2]. A subnormal number may count as 0.
void multiply_tile(int64_t depth, const bf16* a, int64_t a_row, const bf16* panel, float* c,
                   int64_t c_row, bool accumulate);

/// What a thread has to hold while it calls multiply_tile() of operands X.
template <class X>
struct TileRegisters {};
/// The matrix registers, set up. The next task may be another library's, which sets them up anew.
template <>
struct TileRegisters<bf16> {
  TileRegisters();
  ~TileRegisters();
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

/// Copies x [rows, columns] of any strides into panels for multiply_tile(). The panel of columns
/// c.. begins at to + c * padded_rows; zeros fill the last one and all rows up to padded_rows.
template <class A, class T>
void pack_panels(A* to, const T* x, int64_t row_stride, int64_t column_stride, int64_t rows,
                 int64_t columns, int64_t padded_rows) {
  constexpr int64_t kColumns = kTileColumns<A>;
  for (int64_t c = 0; c < columns; c += kColumns) {
    const int64_t count = std::min(kColumns, columns - c);
    const T* row = x + c * column_stride;
    for (int64_t k = 0; k < rows; ++k, row += row_stride, to += kColumns) {
      if (count == kColumns && column_stride == 1) {
        for (int64_t j = 0; j < kColumns; ++j) to[j] = load(row[j]);
      } else {
        for (int64_t j = 0; j < count; ++j) to[j] = load(row[j * column_stride]);
        std::fill(to + count, to + kColumns, A{0});
      }
    }
    std::fill_n(to, (padded_rows - rows) * kColumns, A{0});
    to += (padded_rows - rows) * kColumns;
  }
}

/// Two bf16 side by side, the first in the lower half.
typedef uint32_t Pair __attribute__((aligned(2), may_alias));
inline Pair pair_of(bf16 first, bf16 second) { return first.bits | uint32_t{second.bits} << 16; }

/// The same for multiply_tile() of bf16: rows 2k and 2k + 1 of x are zipped. In whole vectors where
/// the elements of a row, or those of a pair, are neighbors.
inline void pack_panels(bf16* to, const bf16* x, int64_t row_stride, int64_t column_stride,
                        int64_t rows, int64_t columns, int64_t padded_rows) {
  constexpr int64_t kColumns = kTileColumns<bf16>;
  for (int64_t c = 0; c < columns; c += kColumns) {
    const int64_t count = std::min(kColumns, columns - c);
    for (int64_t k = 0; k < padded_rows; k += 2, to += 2 * kColumns) {
      const bf16* even = x + k * row_stride + c * column_stride;
      const bf16* odd = even + row_stride;
      Pair* pairs = reinterpret_cast<Pair*>(to);
      if (k + 1 < rows && count == kColumns && column_stride == 1) {
        for (int64_t j = 0; j < kColumns; ++j) pairs[j] = pair_of(even[j], odd[j]);
      } else if (k + 1 < rows && count == kColumns && row_stride == 1) {
        for (int64_t j = 0; j < kColumns; ++j) {
          pairs[j] = *reinterpret_cast<const Pair*>(even + j * column_stride);
        }
      } else {
        for (int64_t j = 0; j < kColumns; ++j) {
          const bool first = k < rows && j < count, second = k + 1 < rows && j < count;
          pairs[j] = pair_of(first ? even[j * column_stride] : bf16(),
                             second ? odd[j * column_stride] : bf16());
        }
      }
    }
  }
}

}  // namespace usp::cpu
