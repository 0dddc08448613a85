#include "run/matmul_rate.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>

#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"
#include "base/threads.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// Numbers in [-0.5, 0.5) that repeat: of zeros products take less power, and less time. They are
/// spread on the device, because a table of a large model has 10^8 of them. A prime number of them
/// repeats, so that rows that follow each other differ.
Tensor random_matrix(int64_t rows, int64_t columns, DType dtype, const std::string& name) {
  constexpr int64_t kPattern = 65521;
  const Tensor x = Tensor::empty({rows, columns}, dtype), flat = x.view({x.numel()});
  const RandomStream stream(1, name);
  std::vector<double> values(std::min(kPattern, x.numel()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = stream.uniform(i) - 0.5;
  const Tensor pattern = Tensor::from_host(values, {std::ssize(values)}, dtype);
  for (int64_t first = 0; first < x.numel(); first += pattern.numel()) {
    const int64_t count = std::min(pattern.numel(), x.numel() - first);
    ops::copy(flat.narrow(0, first, count), pattern.narrow(0, 0, count));
  }
  return x;
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
  const int64_t begin = clock_ns();
  for (int64_t i = 0; i < repeats; ++i) {
    for (Product& product : products) {
      ops::matmul(product.c, product.a, product.b.transposed());
    }
  }
  Runtime::current().wait();
  const double elapsed = seconds_since(begin);
  const HostScope on_host;
  const Tensor longest = Tensor::from_host(std::vector<double>{elapsed}, {1}, DType::f64);
  world.all_reduce(longest, ReduceOp::max);
  return longest.item();
}

/// Compares element [row, column] of x [m, k] times w^T, w [n, k].
void check_element(double got, std::span<const double> x, std::span<const double> w, DType dtype,
                   int64_t row, int64_t column) {
  double wanted = 0, magnitude = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    wanted += x[i] * w[i];
    magnitude += std::abs(x[i] * w[i]);
  }
  const double rounding = dtype == DType::f64 ? 0x1p-52 : 0x1p-23;
  const double last = dtype == DType::bf16 ? 0x1p-8 : 0;
  const double allowed = (double(x.size()) * rounding + last) * magnitude;
  if (std::abs(got - wanted) <= allowed) return;
  usage_error(
      "matrix products are wrong here: with {} threads element [{}, {}] of one in {} is {}, and a "
      "plain loop gives {:.6g}; if threads of OpenMP do not come, OMP_NUM_THREADS=1 helps",
      num_threads(), row, column, name(dtype), got, wanted);
}

}  // namespace

void check_matmul(DType dtype, const std::vector<MatmulShape>& shapes) {
  // On a CPU apart from the run, whose report counts the memory that its steps have reserved.
  std::optional<Runtime> apart;
  std::optional<Runtime::Use> use;
  if (Runtime::current().device() == Device::cpu) use.emplace(apart.emplace(Device::cpu));
  const CategoryScope scope(Category::workspace);
  const auto size = [](const MatmulShape& shape) { return shape.n * shape.k; };
  const MatmulShape& largest = *std::ranges::max_element(shapes, {}, size);
  const int64_t n = largest.n, k = largest.k, threads = num_threads();
  constexpr int64_t kWork = int64_t{1} << 23;  // of a thread, lest fewer of them be woken
  const int64_t rows = std::clamp(kWork * threads / (n * k), 64 * threads, int64_t{1} << 16);
  const Tensor x = random_matrix(rows, k, dtype, "a"), w = random_matrix(n, k, dtype, "b");
  const Tensor product = Tensor::from_host(std::vector<double>(rows * n, NAN), {rows, n}, dtype);
  ops::matmul(product, x, w.transposed());
  const std::vector<double> got = product.items();
  const auto check = [&](int64_t row, std::span<const int64_t> columns) {
    const std::vector<double> x_row = x.narrow(0, row, 1).items();
    for (int64_t column : columns) {
      check_element(got[row * n + column], x_row, w.narrow(0, column, 1).items(), dtype, row,
                    column);
    }
  };
  const auto missing = std::ranges::find_if(got, [](double value) { return std::isnan(value); });
  if (missing != got.end()) {
    const int64_t at = missing - got.begin(), column = at % n;
    check(at / n, {&column, 1});
  }
  // In each direction this many, evenly spread: some in whatever part a thread has.
  constexpr int64_t kSample = 64;
  std::vector<int64_t> columns;
  for (int64_t i = 0; i < kSample; ++i) columns.push_back(i * n / kSample);
  for (int64_t i = 0; i < kSample; ++i) check(i * rows / kSample, columns);
}

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
