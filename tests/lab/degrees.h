#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/attention/polynomial.h"

/// How far off the powers of two of each polynomial are.
namespace usp::lab {

struct Degree {
  int degree;
  double error;  ///< the largest relative one
};

/// Errors of polynomials of each degree, over fractions that lie close together.
inline std::vector<Degree> degrees() {
  constexpr int kPoints = 1 << 16;
  std::vector<Degree> found;
  const auto add = [&]<int degree>() {
    double error = 0;
    for (int i = 0; i <= kPoints; ++i) {
      const float f = static_cast<float>(i) / kPoints - 0.5F;
      const double exact = std::exp2(static_cast<double>(f));
      error = std::max(error, std::abs(attention::exp2_of_fraction<degree>(f) - exact) / exact);
    }
    found.push_back({degree, error});
  };
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (add.template operator()<attention::kLeastDegree + i>(), ...);
  }
  (std::make_integer_sequence<int, attention::kMostDegree - attention::kLeastDegree + 1>());
  return found;
}

}  // namespace usp::lab
