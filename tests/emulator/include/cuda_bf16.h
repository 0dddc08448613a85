#pragma once

#include "cuda_runtime.h"

/// bfloat16 under CUDA's names: stored in 16 bits, computed with in f32.
struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  /// Rounds to nearest even; a NaN becomes the one that CUDA makes.
  __nv_bfloat16(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    bits = value != value ? 0x7fff
                          : static_cast<unsigned short>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

  unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float value) { return value; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }
inline __nv_bfloat16 __double2bfloat16(double value) {
  const float near = static_cast<float>(value);  // to odd, so that rounding twice rounds once
  uint32_t word = std::bit_cast<uint32_t>(near);
  if (near == near && static_cast<double>(near) != value) {
    if (fabs(near) > fabs(value)) --word;
    word |= 1;
  }
  return std::bit_cast<float>(word);
}
inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) { return {pair.x, pair.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }
inline float __low2float(__nv_bfloat162 pair) { return pair.x; }
inline float __high2float(__nv_bfloat162 pair) { return pair.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return std::bit_cast<__nv_bfloat16>(bits);
}
