#include "planner/max_plus.h"

#include <algorithm>

#include "base/check.h"

namespace usp {

MaxPlus MaxPlus::identity(int size) {
  MaxPlus matrix(size, size);
  for (int i = 0; i < size; ++i) matrix.row(i)[i] = 0;
  return matrix;
}

void MaxPlus::apply(std::span<const double> times, std::span<double> into) const {
  const double* item = items_.data();
  for (double& latest : into) {
    latest = kNever;
    for (double time : times) latest = std::max(latest, *item++ + time);
  }
}

// [product]
MaxPlus operator*(const MaxPlus& then, const MaxPlus& first) {
  USP_CHECK(then.columns() == first.rows(), "{} columns cannot wait for {} rows", then.columns(),
            first.rows());
  MaxPlus product(then.rows(), first.columns());
  for (int i = 0; i < then.rows(); ++i) {
    for (int k = 0; k < first.rows(); ++k) {
      const double delay = then.row(i)[k];
      if (delay == kNever) continue;
      for (int j = 0; j < first.columns(); ++j) {
        product.row(i)[j] = std::max(product.row(i)[j], delay + first.row(k)[j]);
      }
    }
  }
  return product;
}
// [product]

}  // namespace usp
