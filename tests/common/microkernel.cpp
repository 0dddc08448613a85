#include "cpu/microkernel.h"

#include "testing.h"

/// The products that attention and f64 matmuls are made of, at every size of the depth and with
/// packed operands that do not fill their panels.
namespace usp::test {
namespace {

/// Elements of T, the value of each of which is far from its neighbors'.
template <class T>
std::vector<T> random_elements(Random& random, int64_t count) {
  std::vector<T> elements;
  for (double value : random.normals(count)) elements.push_back(T(value));
  return elements;
}

/// x [rows, columns] with any strides times a [kTileRows, rows], through panels and tiles.
template <class X>
void check_product(Random& random, int64_t rows, int64_t columns, bool transposed) {
  using A = accumulate_t<X>;
  constexpr int64_t kRows = cpu::kTileRows<X>, kColumns = cpu::kTileColumns<X>;
  const int64_t depth = cpu::round_up(rows, cpu::kTileDepth<X>), a_row = depth + 3;
  const int64_t width = cpu::round_up(columns, kColumns), c_row = width + 5;
  const int64_t row_stride = transposed ? 1 : columns + 1,
                column_stride = transposed ? rows + 1 : 1;
  std::vector<X> a = random_elements<X>(random, kRows * a_row);
  const std::vector<X> x = random_elements<X>(random, (rows + 1) * (columns + 1));
  std::vector<X> panels(depth * width, X(kNaN));
  cpu::pack_panels(panels.data(), x.data(), row_stride, column_stride, rows, columns, depth);

  // One element off, so that nothing is aligned to more than itself.
  const std::vector<A> before = random_elements<A>(random, kRows * c_row + 1);
  for (bool accumulate : {false, true}) {
    CAPTURE(rows, columns, transposed, accumulate);
    std::vector<A> c = before;
    [[maybe_unused]] const cpu::TileRegisters<X> registers;
    for (int64_t column = 0; column < width; column += kColumns) {
      cpu::multiply_tile(depth, a.data(), a_row, panels.data() + column * depth,
                         c.data() + 1 + column, c_row, accumulate);
    }
    Values expected(before.begin(), before.end());
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        double& sum = expected[1 + i * c_row + j];
        if (!accumulate) sum = 0;
        for (int64_t k = 0; k < rows && j < columns; ++k) {
          sum += double(a[i * a_row + k]) * double(x[k * row_stride + j * column_stride]);
        }
      }
    }
    check_close(Values(c.begin(), c.end()), expected, 1e-6, "c");
    for (int64_t i = 0; i < kRows; ++i) {  // what lies between the rows
      for (int64_t j = width; j < c_row; ++j) {
        REQUIRE(c[1 + i * c_row + j] == before[1 + i * c_row + j]);
      }
    }
  }
}

TEMPLATE_TEST_CASE("tiles of a product agree with its definition", "", float, double, bf16) {
  Random random(1);
  for (int64_t rows : {1, 2, 5, 31, 32, 33, 64, 101}) {
    for (int64_t columns : {1, 15, 32, 33, 70}) {
      for (bool transposed : {false, true}) {
        check_product<TestType>(random, rows, columns, transposed);
      }
    }
  }
}

}  // namespace
}  // namespace usp::test
