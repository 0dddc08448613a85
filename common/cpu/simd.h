#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "dtype.h"

namespace usp::cpu {

/// Bytes of one SIMD register of the instruction set that the build targets.
#if defined(__AVX512F__)
inline constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int64_t kVectorBytes = 32;
#else
inline constexpr int64_t kVectorBytes = 16;
#endif

template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();

/// Element x as a number to compute with.
template <class T>
accumulate_t<T> load(const T& x) {
  return static_cast<accumulate_t<T>>(x);
}
/// element = value, rounded. A function, because GCC does not vectorise a loop that holds the
/// conversion's temporary object itself.
template <class T>
void store(T& element, accumulate_t<T> value) {
  element = static_cast<T>(value);
}

/// e^x to 1.5 ulp, without branches or calls, so that loops over it vectorise. NaN stays NaN;
/// results below 1.8e-38 are 0.
inline float exp(float x) {
  constexpr float kRound = 0x1.8p23F;  // adding it leaves an integer in the low mantissa bits
  constexpr float kLog2e = 0x1.715476p0F;
  constexpr float kLn2High = 0x1.62e400p-1F, kLn2Low = 0x1.7f7d1cp-20F;
  const float bounded = x > 89.0F ? 89.0F : x;  // e^89 overflows to infinity, as it should
  const float shifted = std::fma(bounded, kLog2e, kRound);
  const float n = shifted - kRound;  // x = n ln 2 + r, |r| <= ln 2 / 2
  const float r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, bounded));
  float p = 1.9875691500e-4F;  // (e^r - 1 - r) / r^2
  p = std::fma(p, r, 1.3981999507e-3F);
  p = std::fma(p, r, 8.3334519073e-3F);
  p = std::fma(p, r, 4.1665795894e-2F);
  p = std::fma(p, r, 1.6666665459e-1F);
  p = std::fma(p, r, 5.0000001201e-1F);
  const float e_to_r = std::fma(std::fma(p, r, 1.0F), r, 1.0F);
  // 2^(n-1), made of its exponent bits, then doubled: n = 128 has no exponent of its own.
  const auto half_scale = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 126) << 23);
  return x < -86.9F ? 0.0F : e_to_r * half_scale * 2.0F;
}

inline double exp(double x) { return std::exp(x); }

/// max(start, x[0..count)); NaN is passed over.
template <class T>
accumulate_t<T> max_of(const T* x, int64_t count, accumulate_t<T> start) {
  using A = accumulate_t<T>;
  // One maximum per SIMD lane: without -ffast-math the compiler would keep a single one in order.
  constexpr int64_t kLanes = 2 * kVectorBytes / int64_t{sizeof(A)};
  A lanes[kLanes];
  for (A& lane : lanes) lane = start;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int64_t l = 0; l < kLanes; ++l) {
      const A value = load(x[i + l]);
      lanes[l] = value > lanes[l] ? value : lanes[l];
    }
  }
  for (; i < count; ++i) start = std::max(start, load(x[i]));
  for (A lane : lanes) start = std::max(start, lane);
  return start;
}

}  // namespace usp::cpu
