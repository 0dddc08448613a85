#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace usp {

/// A size that a formula may read, and the values at which a function of it is asked: multiples of
/// the step. Half of them begin at the usual one. At `lowest` the function has a value as well,
/// though the size is none.
struct Letter {
  std::string name;
  int64_t step = 2, least = 2, usual = 16, largest = 2048, lowest = least;
  int64_t power = 1;  ///< the highest in a formula
};
using Letters = std::vector<Letter>;
/// A value, or an exponent, for each of the letters.
using Sizes = std::vector<int64_t>;

/// A polynomial in the sizes, with whole coefficients: {exponents: coefficient}, none of them 0.
using Polynomial = std::map<Sizes, int64_t>;
/// The largest of several polynomials; of none: 0.
using Maximum = std::vector<Polynomial>;

int64_t value_of(const Maximum& maximum, const Sizes& at);

/// A function of the sizes with several named values, such as the bytes of every tensor.
using Named = std::map<std::string, int64_t>;
using Function = std::function<Named(const Sizes&)>;

/// Sizes of all magnitudes, the same for the same number.
Sizes random_sizes(const Letters& letters, uint64_t number);

/// What a function computes, from its values: exact where it is the largest of polynomials with no
/// higher powers than the letters'. Throws Error where those found do not give its values at
/// hundreds of points.
std::map<std::string, Maximum> interpolate(const Letters& letters, const Function& function);

}  // namespace usp
