#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace usp::cpu {

/// The tile of c that multiply_tile() keeps in registers: 6 rows of two SIMD vectors are 12
/// accumulators, which hide the latency of a multiply-add and leave 4 of 16 registers for a and b.
inline constexpr int64_t kTileRows = 6;
template <class A>
inline constexpr int64_t kTileColumns = 2 * kVectorBytes / int64_t{sizeof(A)};

/// c [kTileRows, kTileColumns] = or += a [kTileRows, depth] panel [depth, kTileColumns]. Row i of a
/// begins at a + i * a_row, its elements are a_column apart; the panel is contiguous; rows of c are
/// c_row apart. A is float or double. Every element is one sum in index order, so splitting the
/// depth over several accumulating calls gives the same bits.
template <class A>
void multiply_tile(int64_t depth, const A* a, int64_t a_row, int64_t a_column, const A* panel, A* c,
                   int64_t c_row, bool accumulate);

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

}  // namespace usp::cpu
