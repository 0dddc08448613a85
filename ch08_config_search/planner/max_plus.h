#pragma once

#include <limits>
#include <span>
#include <vector>

namespace usp {

/// Earlier than every time: what comes then delays nothing, whatever is added to it.
constexpr double kNever = -std::numeric_limits<double>::infinity();

/// A matrix over (max, +), where the larger of two stands for their sum, and their sum for their
/// product. Its rows say when things happen that wait for others: each that it waits for has a
/// column, and its time, so much later, counts; kNever in the place of what is not waited for.
/// Source: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity".
class MaxPlus {
 public:
  /// Waits for nothing.
  MaxPlus(int rows, int columns) : columns_(columns), items_(size_t(rows) * columns, kNever) {}
  /// Everything happens when it happens.
  static MaxPlus identity(int size);

  /// How many things it times.
  int rows() const { return columns_ == 0 ? 0 : static_cast<int>(items_.size()) / columns_; }
  int columns() const { return columns_; }  ///< how many they wait for
  /// What one of them waits for, and by how much it is later: [columns].
  std::span<double> row(int i) { return {items_.data() + size_t(i) * columns_, size_t(columns_)}; }
  /// The same.
  std::span<const double> row(int i) const {
    return {items_.data() + size_t(i) * columns_, size_t(columns_)};
  }

  /// Times of its rows, as many as there are places, from row `first` on: from those of what they
  /// wait for, [columns].
  void apply(std::span<const double> times, std::span<double> into, int first = 0) const;
  /// Row i of its product with the matrix of these rows.
  void multiply(int i, std::span<const std::span<const double>> first,
                std::span<double> into) const;

 private:
  int columns_;
  std::vector<double> items_;  ///< [rows, columns]
};

/// First `first`, then `then`: max over k of then(i, k) + first(k, j), [then.rows, first.columns].
/// Throws Error where the rows of one are not the columns of the other.
MaxPlus operator*(const MaxPlus& then, const MaxPlus& first);

}  // namespace usp
