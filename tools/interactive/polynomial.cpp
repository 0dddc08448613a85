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
using Point = std::pair<Sizes, Named>;

constexpr uint64_t kPoints = 600;  // at which the result must be right
constexpr uint64_t kProbes = 60;   // of these, where each letter is tried

/// The letters that a value depends on, by their numbers: only these span its grids.
using Active = std::vector<size_t>;

size_t points_of_grid(const Letters& letters, const Active& active) {
  size_t points = 1;
  for (size_t letter : active) points *= size_t(letters[letter].power + 1);
  return points;
}

/// The point of a grid with this number, or the exponents of the coefficient with it.
Sizes digits_of(size_t number, const Letters& letters, const Active& active) {
  Sizes digits(letters.size());
  for (size_t letter : active) {
    const size_t points = size_t(letters[letter].power + 1);
    digits[letter] = int64_t(number % points);
    number /= points;
  }
  return digits;
}

/// Values at x, x + step (and x + 2 step) into coefficients of 1, the size (and its square), along
/// one letter. False where they are no whole numbers.
bool to_coefficients(Table& table, size_t stride, int64_t points, Wide x, Wide step) {
  for (size_t begin = 0; begin < table.size(); ++begin) {
    if (begin / stride % size_t(points) != 0) continue;
    Wide &c0 = table[begin], &c1 = table[begin + stride];
    const Wide slope = c1 - c0;
    Wide square = 0;
    if (points == 3) {
      Wide& c2 = table[begin + 2 * stride];
      const Wide second = c2 - 2 * c1 + c0;
      if (second % (2 * step * step) != 0) return false;
      square = c2 = second / (2 * step * step);
    }
    if (slope % step != 0) return false;
    c1 = slope / step - (2 * x + step) * square;
    c0 -= x * c1 + x * x * square;
  }
  return true;
}

/// A grid: its first point, and what a letter changes by from one point to the next.
struct Grid {
  Sizes at;
  std::vector<int64_t> steps;
};

/// The polynomial with these values on the grid; nothing where there is none.
std::optional<Polynomial> polynomial_of(Table table, const Letters& letters, const Active& active,
                                        const Grid& grid) {
  size_t stride = 1;
  for (size_t letter : active) {
    const int64_t points = letters[letter].power + 1;
    if (!to_coefficients(table, stride, points, grid.at[letter], grid.steps[letter])) return {};
    stride *= size_t(points);
  }
  Polynomial polynomial;
  for (size_t number = 0; number < table.size(); ++number) {
    if (table[number] < -INT32_MAX || table[number] > INT32_MAX) return {};
    if (table[number] == 0) continue;
    polynomial[digits_of(number, letters, active)] = int64_t(table[number]);
  }
  return polynomial;
}

/// A function's values on a grid.
Table values_on(const Grid& grid, const Letters& letters, const Active& active,
                const Function& function, const std::string& name) {
  Table table(points_of_grid(letters, active));
  for (size_t number = 0; number < table.size(); ++number) {
    Sizes point = grid.at;
    const Sizes digits = digits_of(number, letters, active);
    for (size_t letter : active) point[letter] += grid.steps[letter] * digits[letter];
    table[number] = function(point).at(name);
  }
  return table;
}

/// Which letters change which values.
std::map<std::string, Active> active_letters(const Letters& letters, const Function& function,
                                             const std::vector<Point>& known) {
  std::map<std::string, Active> active;
  for (const auto& [name, value] : known[0].second) active[name] = {};
  for (size_t letter = 0; letter < letters.size(); ++letter) {
    for (size_t probe = 0; probe < kProbes; ++probe) {
      auto [at, values] = known[probe * known.size() / kProbes];
      at[letter] += letters[letter].step;
      for (const auto& [name, value] : function(at)) {
        Active& of_name = active.at(name);
        const bool has = !of_name.empty() && of_name.back() == letter;
        if (value != values.at(name) && !has) of_name.push_back(letter);
      }
    }
  }
  return active;
}

/// Nothing where that is more than any number of bytes: then it is no polynomial of the function's.
std::optional<Wide> wide_value_of(const Polynomial& polynomial, const Sizes& at) {
  Wide sum = 0;
  for (const auto& [exponents, coefficient] : polynomial) {
    Wide term = coefficient;
    for (size_t letter = 0; letter < at.size(); ++letter) {
      for (int64_t times = 0; times < exponents[letter]; ++times) {
        if (__builtin_mul_overflow(term, Wide(at[letter]), &term)) return {};
      }
    }
    if (__builtin_add_overflow(sum, term, &sum)) return {};
  }
  return sum;
}

/// The search for a function's polynomials.
class Interpolation {
 public:
  Interpolation(const Letters& letters, const Function& function)
      : letters_(letters), function_(function) {
    for (uint64_t number = 0; number < kPoints; ++number) {
      const Sizes at = random_sizes(letters, number);
      known_.emplace_back(at, function(at));
    }
    active_ = active_letters(letters, function, known_);
    // Wherever the polynomials so far are too few, those around the point are another one: those on
    // one side of it as a rule, which is tried at all points before any other.
    for (const bool any_side : {false, true}) {
      for (const auto& [at, values] : known_) {
        for (const auto& [name, value] : values) {
          if (value_of(found_[name], at) != value) add(name, at, any_side);
        }
      }
    }
    for (const auto& [at, values] : known_) {
      for (const auto& [name, value] : values) {
        USP_CHECK(value_of(found_[name], at) == value, "{} is no maximum of {} polynomials", name,
                  found_[name].size());
      }
    }
  }
  std::map<std::string, Maximum> found() && { return std::move(found_); }

 private:
  /// Adds the polynomial around a point if there is one.
  void add(const std::string& name, const Sizes& at, bool any_side) {
    const Active& active = active_.at(name);
    const size_t most = any_side ? size_t{1} << active.size() : 1;
    for (size_t sides = 0; sides < most; ++sides) {
      Grid grid{at, std::vector<int64_t>(at.size())};
      bool inside = true;
      for (size_t i = 0; i < active.size(); ++i) {
        const Letter& letter = letters_[active[i]];
        const int64_t step = (sides >> i & 1) == 0 ? letter.step : -letter.step;
        inside = inside && at[active[i]] + letter.power * step >= letter.lowest;
        grid.steps[active[i]] = step;
      }
      if (!inside) continue;
      const auto polynomial =
          polynomial_of(values_on(grid, letters_, active, function_, name), letters_, active, grid);
      if (!polynomial || !fits(name, *polynomial) || !continues(name, *polynomial, grid)) continue;
      found_[name].push_back(*polynomial);
      return;
    }
  }

  /// Whether the polynomial exceeds the function nowhere, as one that is its maximum must.
  bool fits(const std::string& name, const Polynomial& polynomial) const {
    return std::ranges::all_of(known_, [&](const Point& point) {
      const std::optional<Wide> value = wide_value_of(polynomial, point.first);
      return value && *value <= point.second.at(name);
    });
  }

  /// Whether it is the function beyond the grid as well, along each letter at one end at least:
  /// across a kink it is not.
  bool continues(const std::string& name, const Polynomial& polynomial, const Grid& grid) const {
    return std::ranges::all_of(active_.at(name), [&](size_t letter) {
      const Letter& of = letters_[letter];
      const auto agrees = [&](int64_t value) {
        Sizes beyond = grid.at;
        beyond[letter] = value;
        return value >= of.lowest &&
               wide_value_of(polynomial, beyond) == Wide(function_(beyond).at(name));
      };
      const int64_t first = grid.at[letter], step = grid.steps[letter];
      return agrees(first + (of.power + 1) * step) || agrees(first - step);
    });
  }

  const Letters& letters_;
  const Function& function_;
  std::vector<Point> known_;
  std::map<std::string, Active> active_;
  std::map<std::string, Maximum> found_;
};

}  // namespace

int64_t value_of(const Maximum& maximum, const Sizes& at) {
  Wide largest = 0;
  for (const Polynomial& polynomial : maximum) {
    const std::optional<Wide> value = wide_value_of(polynomial, at);
    USP_CHECK(value && *value <= INT64_MAX, "a formula has more bytes than can be counted");
    largest = std::max(largest, *value);
  }
  return int64_t(largest);
}

Sizes random_sizes(const Letters& letters, uint64_t number) {
  static const RandomStream random(1, "interpolation");
  Sizes sizes;
  for (size_t letter = 0; letter < letters.size(); ++letter) {
    const Letter& of = letters[letter];
    const bool least = number % 2 == 0 && random.uniform(number, letters.size() + letter) < 0.5;
    const double from = double(number % 2 == 0 ? of.least : of.usual), to = double(of.largest);
    const double value = from * std::pow(to / from, random.uniform(number, letter));
    sizes.push_back(least ? of.least : of.step * std::llround(value / double(of.step)));
  }
  return sizes;
}

std::map<std::string, Maximum> interpolate(const Letters& letters, const Function& function) {
  return Interpolation(letters, function).found();
}

}  // namespace usp
