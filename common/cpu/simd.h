#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "dtype.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define USP_LANES
#define USP_SIMD avx512
#else
#define USP_SIMD portable
#endif

/// Loops over the elements of a row. A loop's body is written once, for an index that is either one
/// element or, where the CPU has AVX-512, the Lanes of a register; on other CPUs the compiler
/// vectorises it. Both give the same bits: every operation is in IEEE arithmetic, and sums have the
/// same order.
namespace usp::cpu {

/// Names of the two must differ: the tests compile this file for any CPU, the kernels for this one.
inline namespace USP_SIMD {

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

/// The lowest multiple of `multiple` that is no lower than value.
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Element x as a number to compute with.
template <class T>
accumulate_t<T> load(const T& x) {
  return static_cast<accumulate_t<T>>(x);
}
/// Element i of x as a number to compute with.
template <class T>
accumulate_t<T> load(const T* x, int64_t i) {
  return load(x[i]);
}
/// element = value, rounded. A function, because GCC does not vectorise a loop that holds the
/// conversion's temporary object itself.
template <class T>
void store(T& element, accumulate_t<T> value) {
  element = static_cast<T>(value);
}
template <class T>
void store(T* y, int64_t i, accumulate_t<T> value) {
  store(y[i], value);
}

/// a b + c, rounded once.
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float abs(float x) { return std::abs(x); }
/// b if b > a, else a.
template <class A>
inline A max(A a, A b) {
  return b > a ? b : a;
}
/// The smaller of x and bound; NaN stays NaN.
inline float at_most(float x, float bound) { return x > bound ? bound : x; }
/// x 2^n of an integer n from -125 to 128. Doubled first: n = 128 has no exponent of its own.
inline float times_power_of_2(float x, float n) {
  const auto biased = std::bit_cast<uint32_t>(n + (0x1.8p23F + 126));  // in the low mantissa bits
  return x * 2.0F * std::bit_cast<float>(biased << 23);
}
/// score where keys[i] <= query, else -infinity.
template <class A>
inline A hide_later(A score, const int32_t* keys, int64_t i, int32_t query) {
  return keys[i] <= query ? score : -kInfinity<A>;
}

/// Elements that a loop takes at a time where it also fetches what comes next.
inline constexpr int64_t kStride = 64;

/// Asks for kStride elements to be brought into the cache, to be written if T is not const. They
/// need not exist.
template <class T>
void prefetch(T* x) {
  for (int64_t byte = 0; byte < kStride * int64_t{sizeof(T)}; byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(x) + byte, !std::is_const_v<T>);
  }
}

}  // namespace USP_SIMD
}  // namespace usp::cpu

#if defined(USP_LANES)
#include "lanes.h"
#endif

namespace usp::cpu {
inline namespace USP_SIMD {

/// e^x to 3 ulp, without branches or calls, so that loops over it vectorise. NaN stays NaN; results
/// below 1.8e-38 are 0. F is float or Floats.
template <class F>
inline F exp(F x) {
  constexpr float kRound = 0x1.8p23F;  // adding and subtracting it rounds to an integer
  constexpr float kLog2e = 0x1.715476p0F;
  constexpr float kLn2High = 0x1.62e400p-1F, kLn2Low = 0x1.7f7d1cp-20F;
  const F bounded = at_most(x, 89.0F);  // e^89 overflows to infinity, as it should
  const F n = fma(bounded, F{} + kLog2e, F{} + kRound) - kRound;  // x = n ln 2 + r
  const F r = fma(n, F{} - kLn2Low, fma(n, F{} - kLn2High, bounded));
  F e_to_r = F{} + 8.2903141e-3F;  // its minimax polynomial for |r| <= ln 2 / 2, 9e-8 off
  e_to_r = fma(e_to_r, r, F{} + 4.1897930e-2F);
  e_to_r = fma(e_to_r, r, F{} + 1.6667636e-1F);
  e_to_r = fma(e_to_r, r, F{} + 4.9999151e-1F);
  e_to_r = fma(e_to_r, r, F{} + 9.9999970e-1F);
  e_to_r = fma(e_to_r, r, F{} + 1.0F);
  return x < -86.9F ? F{} : times_power_of_2(e_to_r, n);
}
inline double exp(double x) { return std::exp(x); }

/// 1 / (1 + e^-x), from an exponential that is at most 1.
template <class F>
inline F sigmoid(F x) {
  const F e = exp(F(-abs(x)));
  return (x < 0.0F ? e : F{} + 1.0F) / (1.0F + e);
}
inline double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/// x sigmoid(x)
template <class F>
inline F silu(F x) {
  return x * sigmoid(x);
}
inline double silu(double x) { return x / (1 + exp(-x)); }

/// body(i) for i in [0, count), where body reads and writes elements of T. Meanwhile, count
/// elements from each of `next` on are fetched: the rows that come next. While a loop computes, the
/// hardware asks for little by itself, and at the end of a row it has to find out anew what will be
/// wanted.
template <class T, class Body, class... Next>
void simd_loop(int64_t count, Body body, Next*... next) {
#if defined(USP_LANES)
  if constexpr (std::is_same_v<accumulate_t<T>, float>) return lanes_loop(count, body, next...);
#endif
  const int64_t whole = count - count % kStride;
  for (int64_t begin = 0; begin < whole; begin += kStride) {
    (prefetch(next + begin), ...);
#pragma omp simd
    for (int64_t i = begin; i < begin + kStride; ++i) body(i);
  }
#pragma omp simd
  for (int64_t i = whole; i < count; ++i) body(i);
}

/// y[n][i] = values(i)[n], rounded, for i in [0, count); otherwise like simd_loop().
template <class T, size_t N, class Values, class... Next>
void simd_map(const std::array<T*, N>& y, int64_t count, Values values, Next*... next) {
  const auto element = [=](auto i) {
    const auto row = values(i);
    for (size_t n = 0; n < N; ++n) store(y[n], i, row[n]);
  };
  simd_loop<T>(count, element, next...);
}

/// y[i] = value(i), rounded, for i in [0, count); otherwise like simd_loop().
template <class T, class Value, class... Next>
void simd_map(T* y, int64_t count, Value value, Next*... next) {
  simd_loop<T>(
      count, [=](auto i) { store(y, i, value(i)); }, next...);
}

/// How many partial results simd_reduce() is to have for elements T: one for f64, whose sums are in
/// index order.
template <class T>
inline constexpr int64_t kPartials = std::is_same_v<T, double> ? 1 : kStride;

/// combine(... combine(combine(start, term(0)), term(1)) ..., term(count - 1)), meanwhile fetching
/// like simd_loop(). Term i goes to partial result i % kParts, which each begin with `start`,
/// whatever the instruction set; kParts is 1 or kStride.
template <int64_t kParts, class A, class Term, class Combine, class... Next>
A simd_reduce(int64_t count, A start, Term term, Combine combine, Next*... next) {
  if constexpr (kParts == 1) {
    A result = start;
    for (int64_t i = 0; i < count; ++i) result = combine(result, term(i));
    return result;
  } else {
#if defined(USP_LANES)
    if constexpr (std::is_same_v<A, float>)
      return lanes_reduce(count, start, term, combine, next...);
#endif
    const int64_t whole = count - count % kStride;
    A results[kStride];
    for (A& result : results) result = start;
    for (int64_t begin = 0; begin < whole; begin += kStride) {
      (prefetch(next + begin), ...);
#pragma omp simd
      for (int64_t i = 0; i < kStride; ++i) results[i] = combine(results[i], term(begin + i));
    }
#pragma omp simd
    for (int64_t i = 0; i < count - whole; ++i) results[i] = combine(results[i], term(whole + i));
    for (int64_t half = kStride / 2; half > 0; half /= 2) {
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) results[i] = combine(results[i], results[half + i]);
    }
    return results[0];
  }
}

/// The sum of term(i) over [0, count).
template <class A, int64_t kParts, class Term, class... Next>
A simd_sum(int64_t count, Term term, Next*... next) {
  const auto add = [](auto a, auto b) { return a + b; };
  return simd_reduce<kParts>(count, A{0}, term, add, next...);
}

/// The sum of term(i) over [0, count): of f64 in the order that the compiler finds fastest.
template <class A, class Term, class... Next>
A fast_sum(int64_t count, Term term, Next*... next) {
  if constexpr (std::is_same_v<A, float>) return simd_sum<A, kStride>(count, term, next...);
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += term(i);
  return sum;
}

/// The largest of `start` and term(i) for i in [0, count); NaN is passed over.
template <class A, class Term>
A simd_max(int64_t count, A start, Term term) {
  const auto larger = [](auto a, auto b) { return max(a, b); };
  return simd_reduce<kStride>(count, start, term, larger);
}

}  // namespace USP_SIMD
}  // namespace usp::cpu
