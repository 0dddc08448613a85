#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cuda/launch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"
#include "kernels/attention/ladder.h"

/// Attention of random numbers on the emulated GPU.
namespace usp::lab {

using attention::Problem;
using attention::Rung;
using attention::Shape;

/// How large scores are. far_below: near -40, so that a key that is not there would count with 0
/// for much. growing: those of the second half of the keys are near 100, or -100.
enum class Scores { usual, far_below, growing };

/// Operands of a shape, for any rung of its type.
template <class T>
class Attended {
 public:
  explicit Attended(const Rung<T>& rung, const Shape& shape, Scores scores = Scores::usual)
      : q_(random(rows_of(shape, shape.queries, shape.heads), 1,
                  scores == Scores::far_below ? 2 : 0)),
        k_(keys_of(shape, scores)),
        v_(random(rows_of(shape, shape.keys, shape.kv_heads), 3, 0)),
        out_(std::vector<T>(rows_of(shape, shape.queries, shape.heads), T(NAN))),
        lse_(std::vector<float>(rows_of(shape, shape.queries, shape.heads) / shape.width, NAN)),
        scores_(std::max<size_t>(rung.scratch(shape) / sizeof(float), 1)),
        problem{shape,   q_,    k_, v_, out_, lse_, 1 / std::sqrt(static_cast<float>(shape.width)),
                scores_, &maps_} {}

  std::vector<double> out() const { return wide(out_.host()); }
  std::vector<double> lse() const { return wide(lse_.host()); }

  std::vector<double> q() const { return wide(q_.host()); }
  std::vector<double> k() const { return wide(k_.host()); }
  std::vector<double> v() const { return wide(v_.host()); }

 private:
  static size_t rows_of(const Shape& x, int rows, int heads) {
    return size_t{1} * x.samples * rows * heads * x.width;
  }
  static std::vector<T> random(size_t count, unsigned seed, float mean) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(mean, 1);
    std::vector<T> values(count);
    for (T& value : values) value = T(normal(random));
    return values;
  }
  static std::vector<T> keys_of(const Shape& x, Scores scores) {
    std::vector<T> k =
        random(rows_of(x, x.keys, x.kv_heads), 2, scores == Scores::far_below ? -2 : 0);
    for (size_t i = k.size() / 2; scores == Scores::growing && i < k.size(); ++i) {
      k[i] = T(static_cast<float>(k[i]) * 60);
    }
    return k;
  }
  template <class X>
  static std::vector<double> wide(const std::vector<X>& values) {
    std::vector<double> all;
    for (const X& value : values) all.push_back(static_cast<float>(value));
    return all;
  }

  emulator::test::Array<T> q_, k_, v_, out_;
  emulator::test::Array<float> lse_, scores_;
  cuda::TensorMaps maps_;

 public:
  Problem<T> problem;
};

}  // namespace usp::lab
