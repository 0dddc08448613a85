#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "kernels/ideas/ideas.h"
#include "lab/case.h"

/// Data of the small ladders on the emulated GPU, and what the CPU makes of them.
namespace usp::lab {

/// Random numbers of this shape; y holds NaN, and more than a rung may write.
class IdeasCase {
 public:
  explicit IdeasCase(ideas::Shape shape)
      : x_(random_rows<float>(shape.rows, shape.columns, shape.columns, 1)),
        z_(random_rows<float>(shape.rows, shape.columns, shape.columns, 2)),
        y_(std::vector<float>(shape.n() + kBeyond, NAN)),
        scratch_(4 * shape.n() + 64),
        data{shape, x_, z_, y_, scratch_} {}

  /// What a rung of the file of this name has to leave.
  std::vector<double> expected(const std::string& name, const std::string& rung) const {
    const std::vector<float> x = x_.host(), z = z_.host();
    std::vector<double> y;
    for (int64_t i = 0; i < data.shape.n(); ++i)
      y.push_back(element(name == "primer" ? rung : name, x, z, i));
    if (name == "layer_norm") normalize(y);
    if (name == "reduction") {
      double sum = 0;
      for (const double element : y) sum += element;
      return {sum};
    }
    return y;
  }

  /// As many as are expected; NaN if a rung wrote behind them.
  std::vector<double> y(size_t count) const {
    const std::vector<float> all = y_.host();
    std::vector<double> found(all.begin(), all.begin() + static_cast<ptrdiff_t>(count));
    for (size_t i = count; i < all.size(); ++i) {
      if (!std::isnan(all[i])) found[0] = NAN;
    }
    return found;
  }

 private:
  static constexpr int64_t kBeyond = 32;

  double element(const std::string& name, const std::vector<float>& x, const std::vector<float>& z,
                 int64_t i) const {
    const double at = x[i], other = z[i];
    if (name == "banks") return x[i % data.shape.rows * data.shape.columns + i / data.shape.rows];
    if (name == "divergence") return i % 2 == 0 ? std::exp(at) + other : at * other;
    if (name == "fusion") return at < 0 ? 1.5 * (std::exp(at) - 1) : at;
    if (name == "vector_add") return at + other;
    if (name == "fma_chain") {  // towards 1, a thousandth of the way at a step
      const double left = std::pow(0.999, 256);
      return at * left + 1 - left;
    }
    return at;
  }

  void normalize(std::vector<double>& y) const {
    const auto [rows, columns] = data.shape;
    for (int row = 0; row < rows; ++row) {
      double* const first = y.data() + static_cast<ptrdiff_t>(row) * columns;
      double mean = 0, variance = 0;
      for (int i = 0; i < columns; ++i) mean += first[i] / columns;
      for (int i = 0; i < columns; ++i) {
        variance += (first[i] - mean) * (first[i] - mean) / columns;
      }
      for (int i = 0; i < columns; ++i) first[i] = (first[i] - mean) / std::sqrt(variance + 1e-5);
    }
  }

  Array<float> x_, z_, y_, scratch_;

 public:
  ideas::Data data;
};

/// What the emulator counts of a rung, and how many kernels it queues.
struct Counted {
  emulator::Report report;
  int64_t launches;
};

/// Runs it between two events: of a clock that each operation advances by a microsecond.
inline Counted count(const ideas::Rung& rung, const ideas::Data& data) {
  cudaEvent_t begin, end;
  USP_CUDA(cudaEventCreate(&begin));
  USP_CUDA(cudaEventCreate(&end));
  USP_CUDA(cudaEventRecord(begin, nullptr));
  rung.run(nullptr, data);
  USP_CUDA(cudaEventRecord(end, nullptr));
  emulator::Report report = emulator::take_report();
  float milliseconds = 0;
  USP_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
  USP_CUDA(cudaEventDestroy(begin));
  USP_CUDA(cudaEventDestroy(end));
  return {std::move(report), std::lround(milliseconds * 1e3) - 1};
}

}  // namespace usp::lab
