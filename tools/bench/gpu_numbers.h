#pragma once

#include <vector>

#include "base/rng.h"
#include "tensor/ops.h"
#include "tensor/tensor.h"

namespace usp {

/// Numbers between -0.5 and 0.5 that repeat: products of zeros take less power, and less time. A
/// prime number of them, so that rows differ; and operands of one product need different seeds, or
/// some of its sums are of squares.
inline Tensor numbers(const Shape& shape, DType dtype, uint64_t seed = 1) {
  constexpr int64_t kPrime = 65521;
  const RandomStream stream(seed, "gpu_bench");
  std::vector<double> values(kPrime);
  for (int64_t i = 0; i < kPrime; ++i) values[i] = stream.uniform(i) - 0.5;
  const Tensor pattern = Tensor::from_host(values, {kPrime}, dtype);
  const Tensor x = Tensor::empty(shape, dtype), flat = x.view({x.numel()});
  for (int64_t first = 0; first < x.numel(); first += kPrime) {
    const int64_t count = std::min(kPrime, x.numel() - first);
    ops::copy(flat.narrow(0, first, count), pattern.narrow(0, 0, count));
  }
  return x;
}

}  // namespace usp
