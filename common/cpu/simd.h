#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

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

/// e^x to 3 ulp, without branches or calls, so that loops over it vectorise. NaN stays NaN;
/// results below 1.8e-38 are 0.
inline float exp(float x) {
  constexpr float kRound = 0x1.8p23F;  // adding it leaves an integer in the low mantissa bits
  constexpr float kLog2e = 0x1.715476p0F;
  constexpr float kLn2High = 0x1.62e400p-1F, kLn2Low = 0x1.7f7d1cp-20F;
  const float bounded = x > 89.0F ? 89.0F : x;  // e^89 overflows to infinity, as it should
  const float shifted = std::fma(bounded, kLog2e, kRound);
  const float n = shifted - kRound;  // x = n ln 2 + r, |r| <= ln 2 / 2
  const float r = std::fma(n, -kLn2Low, std::fma(n, -kLn2High, bounded));
  float e_to_r = 8.2903141e-3F;  // its minimax polynomial, 9e-8 off
  e_to_r = std::fma(e_to_r, r, 4.1897930e-2F);
  e_to_r = std::fma(e_to_r, r, 1.6667636e-1F);
  e_to_r = std::fma(e_to_r, r, 4.9999151e-1F);
  e_to_r = std::fma(e_to_r, r, 9.9999970e-1F);
  e_to_r = std::fma(e_to_r, r, 1.0F);
  // 2^(n-1), made of its exponent bits, then doubled: n = 128 has no exponent of its own.
  const auto half_scale = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 126) << 23);
  return x < -86.9F ? 0.0F : e_to_r * half_scale * 2.0F;
}

inline double exp(double x) { return std::exp(x); }

/// Elements that a loop takes at a time where it also fetches what comes next.
inline constexpr int64_t kStride = 64;

/// Asks for kStride elements to be brought into the cache. They need not exist.
template <class T>
void prefetch(const T* x) {
  for (int64_t byte = 0; byte < kStride * int64_t{sizeof(T)}; byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(x) + byte);
  }
}

/// body(i) for i in [0, count), in SIMD lanes. Meanwhile, count elements from each of `next` on are
/// fetched: the rows that come next. While a loop computes, the hardware asks for little by itself,
/// and at the end of a row it has to find out anew what will be wanted.
template <class Body, class... T>
void simd_loop(int64_t count, Body body, const T*... next) {
  const int64_t whole = count - count % kStride;
  for (int64_t begin = 0; begin < whole; begin += kStride) {
    (prefetch(next + begin), ...);
#pragma omp simd
    for (int64_t i = begin; i < begin + kStride; ++i) body(i);
  }
#pragma omp simd
  for (int64_t i = whole; i < count; ++i) body(i);
}

/// How many partial sums simd_sum() is to have for elements T: one for f64, whose sums are in index
/// order.
template <class T>
inline constexpr int64_t kPartialSums = std::is_same_v<T, double> ? 1 : kStride;

/// The sum of term(i) over [0, count), meanwhile fetching like simd_loop(). Term i goes to partial
/// sum i % kSums, whatever the instruction set; kSums is 1 or kStride.
template <class A, int64_t kSums, class Term, class... T>
A simd_sum(int64_t count, Term term, const T*... next) {
  if constexpr (kSums == 1) {
    A sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += term(i);
    return sum;
  } else {
    A sums[kStride] = {};
    const int64_t whole = count - count % kStride;
    for (int64_t begin = 0; begin < whole; begin += kStride) {
      (prefetch(next + begin), ...);
#pragma omp simd
      for (int64_t i = 0; i < kStride; ++i) sums[i] += term(begin + i);
    }
#pragma omp simd
    for (int64_t i = 0; i < count - whole; ++i) sums[i] += term(whole + i);
    for (int64_t half = kStride / 2; half > 0; half /= 2) {
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) sums[i] += sums[half + i];
    }
    return sums[0];
  }
}

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
