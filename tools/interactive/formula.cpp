#include "formula.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace usp {

namespace {

using Factors = std::map<std::string, int64_t>;  // exponents by letter

/// As readers are used to: tokens, then widths, then whoever shares them.
constexpr std::array<const char*, 12> kOrder = {"b",    "s",   "s/cp", "s/cp/tp", "h",  "a",
                                                "a_kv", "h/a", "h_ff", "v",       "tp", "cp"};

/// What letters make together: X of X/Y and Y. The width h/a of a head is a letter of its own.
Factors multiplied_out(Factors factors) {
  for (auto at = factors.begin(); at != factors.end();) {
    const auto [name, exponent] = *at;
    const size_t slash = name.rfind('/');
    const auto divisor = slash == std::string::npos || name == "h/a"
                             ? factors.end()
                             : factors.find(name.substr(slash + 1));
    const int64_t times = divisor == factors.end() ? 0 : std::min(exponent, divisor->second);
    if (times == 0) {
      ++at;
      continue;
    }
    divisor->second -= times;
    at->second -= times;
    factors[name.substr(0, slash)] += times;
    at = factors.begin();  // what was made may be a part of more
  }
  return factors;
}

/// "2 own b s h_ff"
std::string product(int64_t coefficient, const std::string& width, const Sizes& exponents,
                    const Letters& letters) {
  Factors factors;
  for (size_t letter = 0; letter < letters.size(); ++letter) {
    if (exponents[letter] > 0) factors[letters[letter].name] = exponents[letter];
  }
  factors = multiplied_out(std::move(factors));
  std::string text = coefficient == 1 ? "" : fmt::format("{} ", coefficient);
  if (!width.empty()) text += width + " ";
  const auto add = [&](const std::string& name) {
    const int64_t exponent = factors.contains(name) ? factors[name] : 0;
    if (exponent > 0) text += exponent == 1 ? name + " " : fmt::format("{}^{} ", name, exponent);
    factors.erase(name);
  };
  for (const char* name : kOrder) add(name);
  while (!factors.empty()) add(std::string(factors.begin()->first));
  USP_CHECK(!text.empty(), "a term of {}", coefficient);
  return text.substr(0, text.size() - 1);
}

/// Coefficients of the bytes of a number (own), of a sum (acc), and of neither, from those in f32,
/// bf16 and f64, where own and acc are 4 and 4, 2 and 4, 8 and 8.
std::array<int64_t, 3> by_width(int64_t f32, int64_t bf16, int64_t f64) {
  const int64_t own = (f32 - bf16) / 2, neither = 2 * f32 - f64;
  const int64_t acc = (f32 - neither) / 4 - own;
  USP_CHECK(4 * own + 4 * acc + neither == f32 && 2 * own + 4 * acc + neither == bf16,
            "bytes {}, {} and {} are no sum of own and acc", f32, bf16, f64);
  return {own, acc, neither};
}

}  // namespace

const Polynomial& only(const Maximum& maximum) {
  USP_CHECK(maximum.size() == 1, "{} polynomials where one is expected", maximum.size());
  return maximum[0];
}

std::string formula(const Polynomial& polynomial, const Letters& letters) {
  std::string text;
  for (auto term = polynomial.rbegin(); term != polynomial.rend(); ++term) {
    text += (text.empty() ? "" : " + ") + product(term->second, "", term->first, letters);
  }
  return text.empty() ? "0" : text;
}

std::string formula(const std::array<Maximum, 3>& by_dtype, const Letters& letters) {
  std::array<Polynomial, 3> each;
  for (size_t dtype = 0; dtype < each.size(); ++dtype) each[dtype] = only(by_dtype[dtype]);
  std::string text;
  const Polynomial terms = each[0];
  for (const auto& [exponents, ignored] : terms) {
    constexpr std::array<const char*, 3> names = {"own", "acc", ""};
    const std::array<int64_t, 3> widths =
        by_width(each[0][exponents], each[1][exponents], each[2][exponents]);
    for (size_t width = 0; width < widths.size(); ++width) {
      if (widths[width] == 0) continue;
      text += text.empty() ? "" : " + ";
      text += product(widths[width], names[width], exponents, letters);
    }
  }
  return text;
}

std::vector<std::string> formulas(const Maximum& maximum, const Letters& letters) {
  std::vector<std::string> texts;
  for (const Polynomial& polynomial : maximum) texts.push_back(formula(polynomial, letters));
  std::ranges::sort(texts);
  return texts;
}

void add_row(Json& rows, Json row, const char* key, size_t number) {
  for (Json& other : rows) {
    Json without = other;
    without.erase(key);
    if (without == row) {
      other[key].push_back(number);
      return;
    }
  }
  row[key] = {number};
  rows.push_back(std::move(row));
}

}  // namespace usp
