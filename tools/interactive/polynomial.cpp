#include "polynomial.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/check.h"
#include "base/rng.h"

namespace usp {

namespace {

using Wide = __int128;            // of a point across a kink, coefficients may be anything
using Table = std::vector<Wide>;  // of a grid's points, or of coefficients

constexpr int64_t kStep = 2;  // between points of a grid: every size stays even
// Sizes at which a function is asked, letter by letter. They spread far, so that each polynomial is
// the largest somewhere, also between the points of a grid there.
constexpr Sizes kSmallest = {16, 16, 16, 16, 16, 16, 16, 16, 2};
constexpr Sizes kTwos = {2, 2, 2, 2, 2, 2, 2, 2, 2};
constexpr Sizes kLargest = {2048, 2048, 65536, 2048, 2048, 2048, 2048, 2048, 64};
constexpr int kPoints = 500;  // at which the result must be right

int64_t points_of(size_t letter) { return letter == kSequence || letter == kRanks ? 3 : 2; }

size_t points_of_grid() {
  size_t points = 1;
  for (size_t letter = 0; letter < kSizes; ++letter) points *= size_t(points_of(letter));
  return points;
}

/// The point of a grid with this number, or the exponents of the coefficient with it.
Sizes digits_of(size_t number) {
  Sizes digits{};
  for (size_t letter = 0; letter < kSizes; ++letter) {
    digits[letter] = int64_t(number) % points_of(letter);
    number /= size_t(points_of(letter));
  }
  return digits;
}

/// Values at x, x + 2 (and x + 4) into coefficients of 1, the size (and its square), along one
/// letter. False where they are no whole numbers.
bool to_coefficients(Table& table, size_t stride, int64_t points, Wide x) {
  for (size_t begin = 0; begin < table.size(); ++begin) {
    if (begin / stride % size_t(points) != 0) continue;
    Wide &c0 = table[begin], &c1 = table[begin + stride];
    const Wide slope = c1 - c0;
    Wide square = 0;
    if (points == 3) {
      Wide& c2 = table[begin + 2 * stride];
      const Wide second = c2 - 2 * c1 + c0;
      if (second % (2 * kStep * kStep) != 0) return false;
      square = c2 = second / (2 * kStep * kStep);
    }
    if (slope % kStep != 0) return false;
    c1 = slope / kStep - (2 * x + kStep) * square;
    c0 -= x * c1 + x * x * square;
  }
  return true;
}

/// The polynomial with these values on the grid that begins at `at`; nothing where there is none.
std::optional<Polynomial> polynomial_of(Table table, const Sizes& at) {
  size_t stride = 1;
  for (size_t letter = 0; letter < kSizes; ++letter) {
    if (!to_coefficients(table, stride, points_of(letter), at[letter])) return {};
    stride *= size_t(points_of(letter));
  }
  Polynomial polynomial;
  for (size_t number = 0; number < table.size(); ++number) {
    if (table[number] < -INT32_MAX || table[number] > INT32_MAX) return {};
    if (table[number] != 0) polynomial[digits_of(number)] = int64_t(table[number]);
  }
  return polynomial;
}

/// All of a function's values on the grid that begins at `at`.
std::map<std::string, Table> values_around(const Function& function, const Sizes& at) {
  std::map<std::string, Table> tables;
  for (size_t number = 0; number < points_of_grid(); ++number) {
    Sizes point = digits_of(number);
    for (size_t letter = 0; letter < kSizes; ++letter) {
      point[letter] = at[letter] + kStep * point[letter];
    }
    for (const auto& [name, value] : function(point)) {
      tables.try_emplace(name, points_of_grid()).first->second[number] = value;
    }
  }
  return tables;
}

/// Even sizes of all magnitudes.
Sizes random_sizes(uint64_t number, const Sizes& smallest) {
  static const RandomStream random(1, "interpolation");
  Sizes sizes{};
  for (size_t letter = 0; letter < kSizes; ++letter) {
    const double from = double(smallest[letter]), to = double(kLargest[letter]);
    sizes[letter] =
        2 * std::llround(from / 2 * std::pow(to / from, random.uniform(number, letter)));
  }
  return sizes;
}

}  // namespace

int64_t value_of(const Maximum& maximum, const Sizes& at) {
  int64_t largest = 0;
  for (const Polynomial& polynomial : maximum) {
    int64_t sum = 0;
    for (const auto& [exponents, coefficient] : polynomial) {
      int64_t term = coefficient;
      for (size_t letter = 0; letter < kSizes; ++letter) {
        for (int64_t times = 0; times < exponents[letter]; ++times) term *= at[letter];
      }
      sum += term;
    }
    largest = std::max(largest, sum);
  }
  return largest;
}

std::map<std::string, Maximum> interpolate(const Function& function) {
  std::vector<std::pair<Sizes, Named>> known;
  for (uint64_t number = 0; number < 2 * kPoints; ++number) {
    const Sizes at = random_sizes(number, number < kPoints ? kSmallest : kTwos);
    known.emplace_back(at, function(at));
  }
  // Of what is the largest somewhere, no value is above the function's anywhere.
  const auto fits = [&](const std::string& name, const Polynomial& polynomial) {
    return std::ranges::all_of(known, [&](const auto& point) {
      return value_of({polynomial}, point.first) <= point.second.at(name);
    });
  };
  std::map<std::string, Maximum> found;
  // Wherever the polynomials so far are too few, those around the point are another one.
  for (const auto& [at, values] : known) {
    std::map<std::string, Table> around;
    for (const auto& [name, value] : values) {
      if (value_of(found[name], at) == value) continue;
      if (around.empty()) around = values_around(function, at);
      const auto polynomial = polynomial_of(around.at(name), at);
      if (polynomial && fits(name, *polynomial)) found[name].push_back(*polynomial);
    }
  }
  for (const auto& [at, values] : known) {
    for (const auto& [name, value] : values) {
      USP_CHECK(value_of(found[name], at) == value, "{} is no maximum of {} polynomials", name,
                found[name].size());
    }
  }
  return found;
}

}  // namespace usp
