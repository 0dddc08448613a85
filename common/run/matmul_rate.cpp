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

struct Product {
  Tensor a, b, c;
};

/// A round of several ranks: long beside the time that they need to meet.
constexpr double kSharedRoundSeconds = 0.02;

/// Seconds that the slowest rank takes; all begin at the same time.
double time_round(const Communicator& world, std::vector<Product>& products, int64_t repeats) {
  Runtime::current().wait();
  world.barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < repeats; ++i) {
    for (Product& product : products) {
      ops::matmul(product.c, product.a, product.b.transposed());
    }
  }
  Runtime::current().wait();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  const HostScope on_host;
  const Tensor longest = Tensor::from_host(std::vector<double>{elapsed.count()}, {1}, DType::f64);
  world.all_reduce(longest, ReduceOp::max);
  return longest.item();
}

}  // namespace

double measure_matmul_gflops(const Communicator& world, DType dtype,
                             const std::vector<MatmulShape>& shapes, double seconds) {
  const UncountedTraffic uncounted;
  const CategoryScope scope(Category::workspace);
  std::vector<Product> products;
  double flops = 0;
  for (const MatmulShape& shape : shapes) {
    products.push_back({random_matrix(shape.m, shape.k, dtype, "a"),
                        random_matrix(shape.n, shape.k, dtype, "b"),
                        Tensor::empty({shape.m, shape.n}, dtype)});
    flops += 2.0 * double(shape.m * shape.n * shape.k) * world.size();
  }
  // The first two rounds create the library's kernels and wake the cores; they do not count.
  time_round(world, products, 1);
  const double once = time_round(world, products, 1);
  const int64_t repeats =
      world.size() == 1 ? 1 : std::max<int64_t>(1, std::ceil(kSharedRoundSeconds / once));
  double best = HUGE_VAL, spent = 0;
  for (int round = 0; round < 3 || spent < seconds; ++round) {
    const double time = time_round(world, products, repeats);
    spent += time;
    best = std::min(best, time / double(repeats));
  }
  return flops / best * 1e-9;
}

}  // namespace usp
