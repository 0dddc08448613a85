#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string_view>

#include "base/check.h"

namespace usp {

/// bfloat16: the upper half of a float32. Arithmetic happens in float32; storing rounds to nearest
/// even and keeps NaN a NaN.
struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = word + 0x7FFF + ((word >> 16) & 1), quiet_nan = word | 0x400000;
    bits = static_cast<uint16_t>((value != value ? quiet_nan : rounded) >> 16);
  }
  explicit bf16(double value) : bf16(round_to_odd(value)) {}
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
  explicit operator double() const { return static_cast<float>(*this); }

 private:
  /// The float next to an inexact `value` whose last bit is 1. Rounding that to bfloat16 gives what
  /// rounding `value` at once would; rounding to the nearest float first could create a tie.
  static float round_to_odd(double value) {
    const float nearest = static_cast<float>(value);
    if (!(nearest != value) || value != value) return nearest;
    uint32_t word = std::bit_cast<uint32_t>(nearest);
    const double magnitude = value < 0 ? -value : value;
    if (static_cast<double>(nearest < 0 ? -nearest : nearest) > magnitude) --word;  // towards 0
    return std::bit_cast<float>(word | 1);
  }
};

/// What an element of a tensor is.
enum class DType : uint8_t { f32, bf16, f64, i32 };

/// One row per dtype; adding a dtype adds a row here and a case to dispatch().
struct DTypeInfo {
  DType dtype;
  std::string_view name;
  int64_t bytes;
  DType accumulate;  ///< dtype of sums, statistics, accumulated gradients and master weights
};

inline constexpr std::array<DTypeInfo, 4> kDTypes = {{
    {DType::f32, "f32", 4, DType::f32},
    {DType::bf16, "bf16", 2, DType::f32},
    {DType::f64, "f64", 8, DType::f64},
    {DType::i32, "i32", 4, DType::i32},
}};

constexpr const DTypeInfo& info(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }
constexpr std::string_view name(DType dtype) { return info(dtype).name; }
constexpr int64_t bytes_of(DType dtype) { return info(dtype).bytes; }
constexpr DType accumulate_dtype(DType dtype) { return info(dtype).accumulate; }

/// The dtype called `text`; throws UsageError listing the floating-point ones otherwise.
DType parse_dtype(std::string_view text);

/// Maps a C++ element type to its DType.
template <class T>
inline constexpr DType dtype_of = DType::f32;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<int32_t> = DType::i32;

/// The C++ type in which elements of T are summed: float for float and bf16, double for double.
template <class T>
struct Accumulate {
  using type = T;  ///< of a sum
};
template <>
/// 8 bits of precision are too few for a sum.
struct Accumulate<bf16> {
  using type = float;  ///< of a sum
};
template <class T>
/// The same, shorter.
using accumulate_t = typename Accumulate<T>::type;

/// Calls body(T{}) with the C++ type of a floating-point dtype; throws Error for i32.
template <class Body>
decltype(auto) dispatch(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32:
      return body(float{});
    case DType::bf16:
      return body(bf16{});
    case DType::f64:
      return body(double{});
    case DType::i32:
      break;
  }
  fail("an i32 tensor holds indices, not numbers to compute with");
}

}  // namespace usp
