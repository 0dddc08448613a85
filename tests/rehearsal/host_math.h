#pragma once

#include <cmath>

#include "tensor/tensor.h"

/// Arithmetic that chapters 4 to 9 will make operations of, as plain loops over f64 on the CPU. On
/// meta there is nothing to compute.
namespace usp::rehearsal {

inline bool has_data(const Tensor& tensor) { return tensor.device() == Device::cpu; }

/// Two partial results of attention over disjoint keys become one: (out, lse) takes in the other.
/// out and part [B, S, N, D], lse and part_lse [B, N, S].
inline void merge_attention(const Tensor& out, const Tensor& lse, const Tensor& part,
                            const Tensor& part_lse) {
  if (!has_data(out)) return;
  const int64_t B = out.size(0), S = out.size(1), N = out.size(2), D = out.size(3);
  for (int64_t row = 0; row < B * S * N; ++row) {
    const int64_t b = row / (S * N), s = row / N % S, n = row % N;
    double& total = lse.data<double>()[(b * N + n) * S + s];
    const double part_total = part_lse.data<double>()[(b * N + n) * S + s];
    const double max = std::max(total, part_total);
    if (max == -HUGE_VAL) continue;  // neither has seen a key
    const double merged = max + std::log(std::exp(total - max) + std::exp(part_total - max));
    for (int64_t d = row * D; d < (row + 1) * D; ++d) {
      out.data<double>()[d] = std::exp(total - merged) * out.data<double>()[d] +
                              std::exp(part_total - merged) * part.data<double>()[d];
    }
    total = merged;
  }
}

/// sum *= exp(max - new_max), elementwise.
inline void rescale(const Tensor& sum, const Tensor& max, const Tensor& new_max) {
  if (!has_data(sum)) return;
  for (int64_t i = 0; i < sum.numel(); ++i) {
    sum.data<double>()[i] *= std::exp(max.data<double>()[i] - new_max.data<double>()[i]);
  }
}

/// y = x rounded to 8-bit integers times a scale of its own for each row.
inline Tensor fake_quantised(const Tensor& x) {
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  if (!has_data(x)) return y;
  const int64_t columns = x.size(1);
  for (int64_t row = 0; row < x.size(0); ++row) {
    const double* in = x.data<double>() + row * columns;
    double* out = y.data<double>() + row * columns;
    double max = 0;
    for (int64_t i = 0; i < columns; ++i) max = std::max(max, std::abs(in[i]));
    const double scale = max > 0 ? max / 127 : 1;
    for (int64_t i = 0; i < columns; ++i) out[i] = std::round(in[i] / scale) * scale;
  }
  return y;
}

}  // namespace usp::rehearsal
