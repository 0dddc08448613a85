#pragma once

#include <cmath>

#include "cuda/launch.h"

/// Powers of two by multiplications and additions.
namespace usp::attention {

inline constexpr int kLeastDegree = 2, kMostDegree = 6;
/// The least one whose powers are closer than lse has to be.
inline constexpr int kExp2Degree = 4;

/// 2^f for f from -1/2 to 1/2, by `degree` FMAs. Coefficients, from the highest power's on, are
/// those of the least relative error among polynomials that are 1 at 0: whole powers are exact.
template <int degree>
__host__ __device__ inline float exp2_of_fraction(float f) {
  static_assert(kLeastDegree <= degree && degree <= kMostDegree);
  constexpr float kCoefficients[][kMostDegree] = {
      {0.239864111f, 0.702942073f},
      {0.0550089367f, 0.242210999f, 0.693282902f},
      {0.00958285388f, 0.0559064299f, 0.240240991f, 0.693124175f},
      {0.00132647273f, 0.00967151299f, 0.0555073358f, 0.240222424f, 0.693147004f},
      {0.000153533634f, 0.0013398875f, 0.00961843692f, 0.0555033237f, 0.240226477f, 0.693147182f}};
  float y = kCoefficients[degree - kLeastDegree][0];
  for (int i = 1; i < degree; ++i) y = fmaf(y, f, kCoefficients[degree - kLeastDegree][i]);
  return fmaf(y, f, 1);
}

}  // namespace usp::attention
