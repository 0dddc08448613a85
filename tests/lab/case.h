#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "cuda/launch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"
#include "kernels/matmul/ladder.h"

/// Products of random matrices on the emulated GPU.
namespace usp::lab {

using emulator::test::Array;

/// Rows of random numbers, and behind each what nobody may use.
template <class T>
std::vector<T> random_rows(int rows, int columns, int pitch, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<T> values(static_cast<size_t>(rows) * pitch, T(NAN));
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) values[static_cast<size_t>(i) * pitch + j] = uniform(random);
  }
  return values;
}

/// m x n x k, for any rung of its type.
template <class T>
class Case {
 public:
  /// b as Product has it.
  static constexpr bool kTransposed = sizeof(T) == 2;

  Case(int m, int n, int k)
      : a_(random_rows<T>(m, k, pitch(k), 1)),
        b_(kTransposed ? random_rows<T>(n, k, pitch(k), 2) : random_rows<T>(k, n, pitch(n), 2)),
        c_(std::vector<T>(static_cast<size_t>(m) * pitch(n), T(NAN))),
        product{m,  n,        k,     a_, pitch(k), b_, kTransposed ? pitch(k) : pitch(n),
                c_, pitch(n), &maps_} {}

  std::vector<double> a() const { return inside(a_.host(), product.m, product.k, product.a_pitch); }
  std::vector<double> b() const {
    return kTransposed ? inside(b_.host(), product.n, product.k, product.b_pitch)
                       : inside(b_.host(), product.k, product.n, product.b_pitch);
  }
  std::vector<double> c() const { return inside(c_.host(), product.m, product.n, product.c_pitch); }
  /// Did nothing write behind the rows of c?
  bool is_tidy() const {
    const std::vector<T> all = c_.host();
    for (size_t i = 0; i < all.size(); ++i) {
      const bool padding = static_cast<int>(i % product.c_pitch) >= product.n;
      if (padding && !std::isnan(static_cast<float>(all[i]))) return false;
    }
    return true;
  }

 private:
  static int pitch(int columns) { return (columns + 7) / 8 * 8; }
  static std::vector<double> inside(const std::vector<T>& all, int rows, int columns, int pitch) {
    std::vector<double> values;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) values.push_back(static_cast<float>(all[i * pitch + j]));
    }
    return values;
  }

  Array<T> a_, b_, c_;
  cuda::TensorMaps maps_;

 public:
  ladder::Product<T> product;
};

/// Cost of a rung's whole grid, as its formula has it.
template <class T>
ladder::Cost predict(const ladder::Rung<T>& rung, const ladder::Product<T>& p) {
  const int64_t tiles = cuda::ceil_div(p.m, rung.rows) * cuda::ceil_div(p.n, rung.columns);
  const auto [bytes, flops] = rung.cost(p.k);
  return {tiles * bytes, tiles * flops};
}

}  // namespace usp::lab
