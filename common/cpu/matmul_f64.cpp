#include <algorithm>

#include "cpu/cpu_backend.h"
#include "cpu/microkernel.h"
#include "cpu/parallel.h"

namespace usp::cpu {

namespace {

constexpr int64_t kRows = kTileRows<double>, kColumns = kTileColumns<double>;
constexpr int64_t kBlockRows = 8 * kRows;         // with kBlockDepth: 96 KB of a, half of an L2
constexpr int64_t kBlockDepth = 256;              // one panel of b: 16 KB, half of an L1
constexpr int64_t kBlockColumns = 16 * kColumns;  // of c, by one task

/// A matrix of doubles with any strides.
struct Matrix {
  double* data;
  int64_t rows, columns, row_stride, column_stride;

  explicit Matrix(const Tensor& x)
      : data(x.data<double>()),
        rows(x.size(0)),
        columns(x.size(1)),
        row_stride(x.stride(0)),
        column_stride(x.stride(1)) {}
  double at(int64_t row, int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

/// Copies `rows` rows and `depth` columns of a, from (row, column), in groups of kRows rows,
/// element (i, k) of a group at [k * kRows + i]; zeros beyond the last row.
void pack_rows(double* groups, const Matrix& a, int64_t row, int64_t rows, int64_t column,
               int64_t depth) {
  for (int64_t group = 0; group < rows; group += kRows) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t i = group; i < group + kRows; ++i) {
        *groups++ = i < rows ? a.at(row + i, column + k) : 0;
      }
    }
  }
}

/// multiply_tile() on the tile of c at (row, column); where c ends inside it, on a copy.
void multiply_into(const Matrix& c, int64_t row, int64_t column, int64_t depth, const double* group,
                   const double* panel, bool accumulate) {
  double* tile = c.data + row * c.row_stride + column;
  const int64_t rows = std::min(kRows, c.rows - row);
  const int64_t columns = std::min(kColumns, c.columns - column);
  if (rows == kRows && columns == kColumns) {
    multiply_tile(depth, group, 1, panel, tile, c.row_stride, accumulate, kRows);
    return;
  }
  double edge[kRows * kColumns] = {};
  for (int64_t i = 0; accumulate && i < rows; ++i) {
    std::copy_n(tile + i * c.row_stride, columns, edge + i * kColumns);
  }
  multiply_tile(depth, group, 1, panel, edge, kColumns, accumulate, kRows);
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(edge + i * kColumns, columns, tile + i * c.row_stride);
  }
}

}  // namespace

void matmul_f64(Tensor c_tensor, const Tensor& a_tensor, const Tensor& b_tensor, bool accumulate) {
  const Matrix a(a_tensor), b(b_tensor), c(c_tensor);
  const int64_t depth = a.columns;
  const int64_t num_panels = round_up(c.columns, kColumns) / kColumns;
  const Tensor packed = workspace({num_panels, depth, kColumns}, DType::f64);
  double* panels = packed.data<double>();
  parallel_for(num_panels, depth * kColumns, [=](int64_t j) {
    const int64_t column = j * kColumns;
    pack_panels(panels + column * depth, b.data + column * b.column_stride, b.row_stride,
                b.column_stride, depth, std::min(kColumns, b.columns - column), depth);
  });

  const int64_t row_blocks = (c.rows + kBlockRows - 1) / kBlockRows;
  const int64_t column_blocks = (c.columns + kBlockColumns - 1) / kBlockColumns;
  const int64_t cost =
      std::min(kBlockRows, c.rows) * std::min(kBlockColumns, c.columns) * depth / 8;
  parallel_for(row_blocks * column_blocks, cost, [=](int64_t task) {
    alignas(64) double groups[kBlockRows * kBlockDepth];
    const int64_t row = task / column_blocks * kBlockRows;
    const int64_t rows = std::min(kBlockRows, c.rows - row);
    const int64_t column = task % column_blocks * kBlockColumns;
    const int64_t column_end = std::min(c.columns, column + kBlockColumns);
    for (int64_t k = 0; k < depth; k += kBlockDepth) {
      const int64_t count = std::min(kBlockDepth, depth - k);
      pack_rows(groups, a, row, rows, k, count);
      for (int64_t j = column; j < column_end; j += kColumns) {
        const double* panel = panels + j * depth + k * kColumns;
        for (int64_t i = 0; i < rows; i += kRows) {
          multiply_into(c, row + i, j, count, groups + i * count, panel, accumulate || k > 0);
        }
      }
    }
  });
}

}  // namespace usp::cpu
