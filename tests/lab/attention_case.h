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

using attention::bf16;
using attention::Gradients;
using attention::Problem;
using attention::Rung;
using attention::Shape;

/// How large scores are. far_below: near -40, so that a key that is not there would count with 0
/// for much; backward, near -100, where it would have an infinite weight. growing: those of the
/// second half of the keys are near 100, or -100. none: all are 0, and every gradient is a sum of
/// terms of one sign, of which those from rows behind the first 128 have a 128th of the others'
/// size.
enum class Scores { usual, far_below, far_below_backward, growing, none };

/// Mean of queries, and of keys with the other sign, so that scores have theirs.
inline float mean_of(Scores scores) {
  return scores == Scores::far_below ? 2 : scores == Scores::far_below_backward ? 3.5F : 0;
}

/// Operands of a shape, in the order of memory.
template <class T>
class Operand {
 public:
  /// [samples, rows, heads, width], normal random numbers around a mean.
  Operand(const Shape& x, int rows, int heads, int width, unsigned seed, float mean = 0)
      : row_(heads * width),
        width_(width),
        rows_(rows),
        values_(size_t{1} * x.samples * rows * row_) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(mean, 1);
    for (T& value : values_) value = T(normal(random));
  }
  /// value = change(value, row, channel).
  template <class F>
  Operand& change(F change) {
    for (size_t i = 0; i < values_.size(); ++i) {
      const int at = static_cast<int>(i);
      values_[i] = T(change(static_cast<float>(values_[i]), at / row_ % rows_, at % width_));
    }
    return *this;
  }
  operator const std::vector<T>&() const { return values_; }

 private:
  int row_, width_, rows_;
  std::vector<T> values_;
};

template <class T>
std::vector<double> wide(const emulator::test::Array<T>& values) {
  std::vector<double> all;
  for (const T& value : values.host()) all.push_back(static_cast<float>(value));
  return all;
}

/// Factor of a row: a 128th for rows behind the first 128; every second row is negative.
inline float part_of(int row) { return row < 128 ? 1 : 1 / 128.0F; }
inline float sign_of(int row) { return row % 2 == 0 ? 1 : -1; }

/// Operands of a shape, for any rung of its type.
template <class T>
class Attended {
 public:
  /// From three seeds, the first of which is this one.
  explicit Attended(const Rung<T>& rung, const Shape& shape, Scores scores = Scores::usual,
                    unsigned seed = 1)
      : begins_(host_begins(shape)),
        q_(queries_of(shape, scores, seed)),
        k_(keys_of(shape, scores, seed + 1)),
        v_(values_of(shape, scores, seed + 2)),
        out_(std::vector<T>(
            size_t{1} * shape.samples * shape.queries * shape.heads * shape.value_width(), T(NAN))),
        lse_(std::vector<float>(size_t{1} * shape.samples * shape.heads * shape.queries, NAN)),
        scores_(std::max<size_t>(rung.scratch(shape) / sizeof(float), 1)),
        problem{shape,   q_,    k_, v_, out_, lse_, 1 / std::sqrt(static_cast<float>(shape.width)),
                scores_, &maps_},
        on_host(shape) {
    if (shape.begins != nullptr) problem.begins = begins_;
  }

  std::vector<double> out() const { return wide(out_); }
  std::vector<double> lse() const { return wide(lse_); }

  std::vector<double> q() const { return wide(q_); }
  std::vector<double> k() const { return wide(k_); }
  std::vector<double> v() const { return wide(v_); }

 private:
  static std::vector<int32_t> host_begins(const Shape& x) {
    if (x.begins == nullptr) return {0};
    return {x.begins, x.begins + size_t{1} * x.samples * x.queries};
  }
  static std::vector<T> queries_of(const Shape& x, Scores scores, unsigned seed) {
    Operand<T> q(x, x.queries, x.heads, x.width, seed, mean_of(scores));
    if (scores == Scores::none) q.change([](float, int, int channel) { return channel == 0; });
    return q;
  }
  static std::vector<T> keys_of(const Shape& x, Scores scores, unsigned seed) {
    Operand<T> k(x, x.keys, x.kv_heads, x.width, seed, -mean_of(scores));
    if (scores == Scores::growing) {
      k.change([&](float value, int row, int) { return row < x.keys / 2 ? value : value * 60; });
    }
    if (scores == Scores::none) {
      k.change([](float, int row, int channel) {
        return channel == 1 ? sign_of(row) * part_of(row) : 0;
      });
    }
    return k;
  }
  static std::vector<T> values_of(const Shape& x, Scores scores, unsigned seed) {
    Operand<T> v(x, x.keys, x.kv_heads, x.value_width(), seed);
    if (scores == Scores::none) v.change([](float, int row, int) { return sign_of(row); });
    return v;
  }

  emulator::test::Array<int32_t> begins_;
  emulator::test::Array<T> q_, k_, v_, out_;
  emulator::test::Array<float> lse_, scores_;
  cuda::TensorMaps maps_;

 public:
  Problem<T> problem;
  const Shape on_host;  ///< the same, with begins in the host's memory
};

/// A problem of flash_2, which forward() runs, and its gradients, for any rung that goes backward.
class Differentiated {
 public:
  using Row = Gradients<bf16>::Row;

  explicit Differentiated(const Shape& shape, Scores scores = Scores::usual)
      : attended_(attention::kFlash2, shape, scores),
        dout_(dout_of(shape, scores)),
        dq_(std::vector<bf16>(attended_.q().size(), bf16(NAN))),
        dk_(std::vector<bf16>(attended_.k().size(), bf16(NAN))),
        dv_(std::vector<bf16>(attended_.v().size(), bf16(NAN))),
        rows_(size_t{1} * shape.samples * shape.heads * Gradients<bf16>::rows_of(shape.queries)),
        gradients{attended_.problem, dout_, dq_, dk_, dv_, rows_} {}

  void forward() const { attention::kFlash2.run(nullptr, attended_.problem); }

  const Attended<bf16>& attended() const { return attended_; }
  std::vector<double> dout() const { return wide(dout_); }
  std::vector<double> dq() const { return wide(dq_); }
  std::vector<double> dk() const { return wide(dk_); }
  std::vector<double> dv() const { return wide(dv_); }

 private:
  static std::vector<bf16> dout_of(const Shape& x, Scores scores) {
    Operand<bf16> dout(x, x.queries, x.heads, x.value_width(), 4);
    if (scores == Scores::none) dout.change([](float, int row, int) { return part_of(row); });
    return dout;
  }

  Attended<bf16> attended_;
  emulator::test::Array<bf16> dout_, dq_, dk_, dv_;
  emulator::test::Array<Row> rows_;

 public:
  Gradients<bf16> gradients;
};

}  // namespace usp::lab
