#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "base/rng.h"

/// Included before each kernel file, makes its exp and log err as a GPU's may: by one unit in the
/// last place, away from zero. Of 0 and of 1 they are exact there, too. (CUDA programming guide,
/// mathematical functions: at most 2 units of expf, 1 of logf.)
namespace usp::cuda {

template <class T>
T one_off(T y) {
  return y == 0 || y == 1 || std::isinf(y)
             ? y
             : std::nextafter(y, std::copysign(std::numeric_limits<T>::infinity(), y));
}

}  // namespace usp::cuda

namespace std {

template <class T>
T exp_as_compiled(T x) {
  return usp::cuda::one_off(std::exp(x));
}
template <class T>
T log_as_compiled(T x) {
  return usp::cuda::one_off(std::log(x));
}

}  // namespace std

#define exp exp_as_compiled
#define log log_as_compiled
