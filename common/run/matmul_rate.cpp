#include "run/matmul_rate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "base/rng.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

Tensor random_matrix(int64_t rows, int64_t columns, DType dtype, const std::string& name) {
  const RandomStream stream(1, name);
  std::vector<double> values(rows * columns);
  for (size_t i = 0; i < values.size(); ++i) values[i] = stream.uniform(i) - 0.5;
  return Tensor::from_host(values, {rows, columns}, dtype);
}

}  // namespace

double measure_matmul_gflops(DType dtype, const std::vector<MatmulShape>& shapes, double seconds) {
  const CategoryScope scope(Category::workspace);
  struct Product {
    Tensor a, b, c;
  };
  std::vector<Product> products;
  double flops = 0;
  for (const MatmulShape& shape : shapes) {
    products.push_back({random_matrix(shape.m, shape.k, dtype, "a"),
                        random_matrix(shape.n, shape.k, dtype, "b"),
                        Tensor::empty({shape.m, shape.n}, dtype)});
    flops += 2.0 * shape.m * shape.n * shape.k;
  }
  using Clock = std::chrono::steady_clock;
  const auto elapsed = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  double best = HUGE_VAL;
  const auto begin = Clock::now();
  // The first two rounds create the library's kernels and wake the cores; they do not count.
  for (int round = -2; round < 3 || elapsed(begin) < seconds; ++round) {
    const auto round_begin = Clock::now();
    for (Product& product : products) {
      ops::matmul(product.c, product.a, product.b.transposed());
    }
    if (round >= 0) best = std::min(best, elapsed(round_begin));
  }
  return flops / best * 1e-9;
}

}  // namespace usp
