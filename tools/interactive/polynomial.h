#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace usp {

/// The sizes that a formula of memory may read, in the notation's letters: a rank's heads, channels
/// of the MLP and tokens of the vocabulary, and the part s/tp of a sequence.
inline constexpr std::array<const char*, 9> kLetters = {"b",   "s/tp", "h", "a", "a_kv",
                                                        "h/a", "h_ff", "v", "tp"};
inline constexpr size_t kSizes = kLetters.size();
inline constexpr size_t kSequence = 1, kRanks = 8;  // those of s/tp and tp, which may be squared
/// A value, or an exponent, for each of the letters.
using Sizes = std::array<int64_t, kSizes>;

/// A polynomial in the sizes, with whole coefficients: {exponents: coefficient}, none of them 0.
using Polynomial = std::map<Sizes, int64_t>;
/// The largest of several polynomials; of none: 0.
using Maximum = std::vector<Polynomial>;

int64_t value_of(const Maximum& maximum, const Sizes& at);

/// A function of the sizes with several named values, such as the bytes of every tensor.
using Named = std::map<std::string, int64_t>;
using Function = std::function<Named(const Sizes&)>;

/// What a function computes, from its values: exact where it is the largest of polynomials that
/// are quadratic in s/tp and tp and linear in every other size. Throws Error where those found do
/// not give its values at a thousand points.
std::map<std::string, Maximum> interpolate(const Function& function);

}  // namespace usp
