#pragma once

#include <cmath>

#include "tensor/tensor.h"

/// Arithmetic that chapters 4 to 9 will make operations of, as plain loops over f64 on the CPU. On
/// meta there is nothing to compute.
namespace usp::rehearsal {

inline bool has_data(const Tensor& tensor) { return tensor.device() == Device::cpu; }

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
