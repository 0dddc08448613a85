#include "planner/max_plus.h"

#include <algorithm>

#include "base/check.h"

namespace usp {

MaxPlus MaxPlus::identity(int size) {
  MaxPlus matrix(size, size);
  for (int i = 0; i < size; ++i) matrix.row(i)[i] = 0;
  return matrix;
}

void MaxPlus::apply(std::span<const double> times, std::span<double> into, int first) const {
  const double* item = items_.data() + size_t(first) * columns_;
  for (double& row : into) {
    double latest = kNever;
    for (double time : times) latest = std::max(latest, *item++ + time);
    row = latest;
  }
}

// [product]
void MaxPlus::multiply(int i, std::span<const std::span<const double>> first,
                       std::span<double> into) const {
  std::ranges::fill(into, kNever);
  for (size_t k = 0; k < first.size(); ++k) {
    const double delay = row(i)[k];
    if (delay == kNever) continue;
    const double* const from = first[k].data();
    for (size_t j = 0; j < into.size(); ++j) into[j] = std::max(into[j], delay + from[j]);
  }
}

MaxPlus operator*(const MaxPlus& then, const MaxPlus& first) {
  USP_CHECK(then.columns() == first.rows(), "{} columns cannot wait for {} rows", then.columns(),
            first.rows());
  std::vector<std::span<const double>> rows;
  for (int k = 0; k < first.rows(); ++k) rows.push_back(first.row(k));
  MaxPlus product(then.rows(), first.columns());
  for (int i = 0; i < then.rows(); ++i) then.multiply(i, rows, product.row(i));
  return product;
}
// [product]

}  // namespace usp
