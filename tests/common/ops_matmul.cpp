#include <array>

#include "tensor/ops.h"
#include "testing.h"

namespace usp::test {
namespace {

/// c [m, n] + a [m, k] b [k, n] in f64, whatever the strides; without `c`, the product alone.
Values product(const Tensor& a, const Tensor& b, Values c = {}) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  const Values left = a.items(), right = b.items();
  c.resize(m * n);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t l = 0; l < k; ++l) {
      for (int64_t j = 0; j < n; ++j) c[i * n + j] += left[i * k + l] * right[l * n + j];
    }
  }
  return c;
}

/// A random [rows, columns] matrix: row-major or column-major, dense or part of a wider one.
Tensor random_matrix(Random& random, int64_t rows, int64_t columns, DType dtype) {
  const bool transposed = random.integer(0, 1) == 1;
  const int64_t margin = random.integer(0, 1) * random.integer(1, 9);
  const int64_t outer = transposed ? columns : rows, inner = transposed ? rows : columns;
  const Tensor wide = random.tensor({outer, inner + margin}, dtype);
  const Tensor matrix = wide.narrow(1, random.integer(0, margin), inner);
  return transposed ? matrix.transposed() : matrix;
}

/// One product into a part of a wider matrix, whose other elements must stay as they are.
void check_matmul(Random& random, int64_t m, int64_t k, int64_t n, DType dtype, DType c_dtype) {
  const bool accumulate = random.integer(0, 1) == 1;
  CAPTURE(m, k, n, name(dtype), name(c_dtype), accumulate);
  const Tensor a = random_matrix(random, m, k, dtype), b = random_matrix(random, k, n, dtype);
  CAPTURE(a.stride(0), a.stride(1), b.stride(0), b.stride(1));
  const int64_t left = random.integer(0, 3), right = random.integer(0, 3);
  const Tensor wide = random.tensor({m + 1, left + n + right}, c_dtype), before = clone(wide);
  const Tensor c = wide.narrow(0, 0, m).narrow(1, left, n);
  const Values expected = product(a, b, accumulate ? c.items() : Values());
  ops::matmul(c, a, b, accumulate);
  check_close(c, expected, tolerance_of(c_dtype), "c");
  REQUIRE(same_bits(wide.narrow(0, m, 1), before.narrow(0, m, 1)));
  REQUIRE(same_bits(wide.narrow(1, 0, left), before.narrow(1, 0, left)));
  REQUIRE(same_bits(wide.narrow(1, left + n, right), before.narrow(1, left + n, right)));
}

TEST_CASE("matmul agrees with the definition for any size, layout and dtype") {
  const OnDevice cpu;
  Random random(1);
  for (DType dtype : kFloatDTypes) {
    for (DType c_dtype : {dtype, accumulate_dtype(dtype)}) {
      for (int i = 0; i < 40; ++i) {
        const int64_t limit = i % 4 == 0 ? 130 : 20;
        check_matmul(random, random.integer(1, limit), random.integer(1, limit),
                     random.integer(1, limit), dtype, c_dtype);
      }
      check_matmul(random, 1, 1, 1, dtype, c_dtype);
      check_matmul(random, 5, 600, 7, dtype, c_dtype);  // several blocks of the inner dimension
      check_matmul(random, 3, 9, 300, dtype, c_dtype);
      check_matmul(random, 101, 9, 3, dtype, c_dtype);
    }
  }
}

TEST_CASE("matmul over no inner dimension gives zeros, or adds them") {
  const OnDevice cpu;
  Random random(2);
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    const Tensor a = Tensor::empty({3, 0}, dtype), b = Tensor::empty({0, 5}, dtype);
    const Tensor wide = random.tensor({3, 9}, dtype), before = clone(wide);
    ops::matmul(wide.narrow(1, 2, 5), a, b, /*accumulate=*/true);
    REQUIRE(same_bits(wide, before));
    ops::matmul(wide.narrow(1, 2, 5), a, b, /*accumulate=*/false);
    check_close(wide.narrow(1, 2, 5), Values(15, 0.0), 0);
    REQUIRE(same_bits(wide.narrow(1, 0, 2), before.narrow(1, 0, 2)));
    REQUIRE(same_bits(wide.narrow(1, 7, 2), before.narrow(1, 7, 2)));
  }
}

TEST_CASE("matmul in f64 adds the inner dimension in index order, whatever the layout") {
  const OnDevice cpu(Device::cpu);  // a GPU's library has orders of its own
  Random random(3);
  const Tensor a = random.tensor({17, 700}), b = random.tensor({700, 33});
  const Tensor c = Tensor::empty({17, 33}, DType::f64), split = Tensor::empty({17, 33}, DType::f64);
  const Tensor transposed = Tensor::empty({17, 33}, DType::f64);
  ops::matmul(c, a, b);
  ops::matmul(transposed, a.transposed().to_contiguous().transposed(),
              b.transposed().to_contiguous().transposed());
  REQUIRE(same_bits(transposed, c));
  ops::matmul(split, a.narrow(1, 0, 311), b.narrow(0, 0, 311));
  ops::matmul(split, a.narrow(1, 311, 389), b.narrow(0, 311, 389), /*accumulate=*/true);
  REQUIRE(same_bits(split, c));
  const Tensor rows = Tensor::empty({4, 33}, DType::f64);
  ops::matmul(rows, a.narrow(0, 9, 4), b);
  REQUIRE(same_bits(rows, c.narrow(0, 9, 4)));
}

TEST_CASE("a linear layer's three matmuls are y = x Wᵀ and its gradients") {
  const OnDevice cpu;
  for (uint64_t seed : {4, 5, 6}) {
    Random random(seed);
    const int64_t T = random.integer(1, 9), I = random.integer(1, 9), O = random.integer(1, 9);
    const Tensor x = random.tensor({T, I}), weight = random.tensor({O, I});
    const Tensor dy = random.tensor({T, O}), y = Tensor::empty({T, O}, DType::f64);
    const auto loss = [&] {
      ops::linear_forward(y, x, weight);
      return dot(y, dy);
    };
    loss();
    check_close(y, product(x, weight.transposed()), 1e-12, "y");
    const Tensor dx = Tensor::empty({T, I}, DType::f64), dweight = random.tensor({O, I});
    Values sum = dweight.items();
    ops::linear_backward_input(dx, dy, weight);
    check_gradient(dx, x, loss, "dx");
    ops::linear_backward_weight(dweight, dy, x, /*accumulate=*/true);
    check_close(dweight, product(dy.transposed(), x, sum), 1e-12, "dweight, added");
    ops::linear_backward_weight(dweight, dy, x, /*accumulate=*/false);
    check_gradient(dweight, weight, loss, "dweight");
  }
}

TEST_CASE("a residual is added by the product where the device fuses, and after it elsewhere") {
  OnDevice device;
  for (DType dtype : kFloatDTypes) {
    const std::vector<std::array<int64_t, 3>> sizes = {
        {5, 40, 17}, {1, 7, 3}, {33, 24, 16}, {6, 0, 9}};
    for (const auto& [T, I, O] : sizes) {
      CAPTURE(name(dtype), T, I, O);
      Random random(12);
      const Tensor x = random.tensor({T, I}, dtype), weight = random.tensor({O, I}, dtype);
      const Tensor more = random.tensor({T + 1, O}, dtype);
      for (const Tensor& residual : {more.narrow(0, 0, T), more.narrow(0, 1, T)}) {
        const Tensor parts = Tensor::empty({T, O}, dtype), fused = Tensor::empty({T, O}, dtype);
        const Tensor y = Tensor::empty({T, O}, dtype);
        const Values before = residual.items();
        ops::linear_forward(parts, x, weight);
        ops::add(parts, residual, parts);
        device.runtime.backend().fuse(false);
        ops::linear_forward(y, x, weight, residual);
        REQUIRE(same_bits(y, parts));
        device.runtime.backend().fuse(true);
        ops::linear_forward(fused, x, weight, residual);
        check_close(fused, product(x, weight.transposed(), before), tolerance_of(dtype));
        REQUIRE(residual.items() == before);
      }
    }
  }
}

TEST_CASE("a matmul overwrites after one of the same shapes that added, and adds after it") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    CAPTURE(name(dtype));
    Random random(11);
    const Tensor a = random.tensor({9, 20}, dtype), b = random.tensor({20, 33}, dtype);
    const Tensor c = random.tensor({9, 33}, accumulate_dtype(dtype));
    for (bool accumulate : {true, false, true, false}) {
      const Values expected = product(a, b, accumulate ? c.items() : Values());
      ops::matmul(c, a, b, accumulate);
      check_close(c, expected, tolerance_of(accumulate_dtype(dtype)));
    }
  }
}

TEST_CASE("the thousandth shape of a matmul is multiplied like the first, and the first again") {
  const OnDevice cpu;
  Random random(13);
  for (int64_t i = 0; i < 1100; ++i) check_matmul(random, 1 + i, 2, 3, DType::f32, DType::f32);
  check_matmul(random, 1, 2, 3, DType::f32, DType::f32);
}

TEST_CASE("a bf16 layer's weight gradient is summed in f32") {
  const OnDevice cpu;
  Random random(7);
  const Tensor x = random.tensor({300, 5}, DType::bf16), dy = random.tensor({300, 3}, DType::bf16);
  const Tensor dweight = Tensor::empty({3, 5}, DType::f32);
  ops::linear_backward_weight(dweight, dy, x, false);
  check_close(dweight, product(dy.transposed(), x), tolerance_of(DType::f32));
  const Tensor wider = Tensor::empty({3, 5}, DType::f64);
  check_throws<Error>([&] { ops::linear_backward_weight(wider, dy, x, false); }, {"bf16", "f64"});
}

TEST_CASE("two runs of a matmul give the same bits in every dtype") {
  const OnDevice cpu;
  for (DType dtype : kFloatDTypes) {
    Random random(8);
    const Tensor a = random.tensor({65, 130}, dtype), b = random.tensor({130, 67}, dtype);
    const Tensor once = Tensor::empty({65, 67}, dtype), again = Tensor::empty({65, 67}, dtype);
    ops::matmul(once, a, b);
    ops::matmul(again, a, b);
    REQUIRE(same_bits(once, again));
  }
}

}  // namespace
}  // namespace usp::test
