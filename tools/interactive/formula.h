#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <string>

#include "polynomial.h"

namespace usp {

using Json = nlohmann::ordered_json;

constexpr std::array<const char*, 3> kDTypeNames = {"f32", "bf16", "f64"};

/// "2 b s h_ff + ...": letters of which each may have an exponent, as in s^2. A letter X/Y times Y
/// is the letter X: s/cp times cp is s.
std::string formula(const Polynomial& polynomial, const Letters& letters);
/// "2 own b s h_ff + ...", from the bytes in every dtype: own are those of a number, acc of a sum.
/// Throws Error where one of them has a maximum in it, or they are no sum of both and neither.
std::string formula(const std::array<Maximum, 3>& by_dtype, const Letters& letters);
/// Formulas of every polynomial, sorted.
std::vector<std::string> formulas(const Maximum& maximum, const Letters& letters);

/// Only polynomial of what has no maximum in it. Throws Error otherwise.
const Polynomial& only(const Maximum& maximum);

/// Adds the number to the list `key` of the row that is the same otherwise, or the row.
void add_row(Json& rows, Json row, const char* key, size_t number);

}  // namespace usp
