#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "tensor/dtype.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define USP_LANES "lanes_avx512.h"
#define USP_SIMD avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define USP_LANES "lanes_avx2.h"
#define USP_SIMD avx2
#else
#define USP_SIMD portable
#endif

/// Loops over the elements of a row. A loop's body is written once, for an index that is either one
/// element or, where the CPU has AVX2 or AVX-512, the Lanes of a register; on other CPUs the
/// compiler vectorizes it. All give the same bits: every operation is in IEEE arithmetic, and sums
/// have the same order.
namespace usp::cpu {

/// Names must differ: the tests compile this file for any CPU, the kernels for this one.
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
/// element = value, rounded. A function, because GCC does not vectorize a loop that holds the
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
/// The larger of x and bound; NaN stays NaN.
inline float at_least(float x, float bound) { return x < bound ? bound : x; }
/// The float of which the low 8 bits of x's mantissa are the exponent, biased as exponents are.
inline float from_exponent(float x) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(x) << 23);
}
/// The positions from `from` to `to`, both included: of the keys that a query sees.
struct Window {
  int32_t from = 0, to = 0;
};
/// score where keys[i] lies in the window, else -infinity.
inline double hide_unseen(double score, const int32_t* keys, int64_t i, Window window) {
  return window.from <= keys[i] && keys[i] <= window.to ? score : -kInfinity<double>;
}
/// In integers: of a condition GCC may make a branch, and then does not vectorize the loop.
inline float hide_unseen(float score, const int32_t* keys, int64_t i, Window window) {
  const uint32_t unseen = uint32_t{keys[i] < window.from} | uint32_t{keys[i] > window.to};
  const uint32_t seen = unseen - 1;  // all bits or none
  constexpr auto kHidden = std::bit_cast<uint32_t>(-kInfinity<float>);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(score) & seen) | (kHidden & ~seen));
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
#include "cpu/lanes.h"
#endif

namespace usp::cpu {
inline namespace USP_SIMD {

/// c0 + r (c1 + r (c2 + ...))
template <class F>
inline F polynomial(F, float c0) {
  return F{} + c0;
}
template <class F, class... Coefficients>
inline F polynomial(F r, float c0, Coefficients... higher) {
  return fma(polynomial(r, higher...), r, F{} + c0);
}

/// e^x of x <= 0, which is all that softmax and sigmoid ask for; without branches or calls, so that
/// loops over it vectorize. To 3 ulp or, where T = bf16 rounds what comes of it, to 5e-6. NaN stays
/// NaN, results below 8e-39 are 0. F is float or Floats.
template <class T, class F>
inline F exp(F x) {
  constexpr float kLog2e = 0x1.715476p0F;
  // Adding it rounds to an integer n and leaves n + 127, the exponent of 2^n, in the low bits. The
  // least n is -127, of which the power is 0.
  constexpr float kRound = 0x1.8p23F + 127;
  const F bounded = at_least(x, -88.0F);
  const F shifted = fma(bounded, F{} + kLog2e, F{} + kRound), n = shifted - kRound;
  // x = n ln 2 + r, and a minimax polynomial of e^r for |r| <= ln 2 / 2.
  F e_to_r;
  if constexpr (std::is_same_v<T, bf16>) {
    const F r = fma(n, F{} - 0x1.62e430p-1F, bounded);
    e_to_r = polynomial(r, 1, 9.9995154e-1F, 4.9995961e-1F, 1.6808661e-1F, 4.2380678e-2F);
  } else {
    const F r = fma(n, F{} - 0x1.7f7d1cp-20F, fma(n, F{} - 0x1.62e400p-1F, bounded));
    e_to_r =
        polynomial(r, 1, 9.9999970e-1F, 4.9999151e-1F, 1.6667636e-1F, 4.1897930e-2F, 8.2903141e-3F);
  }
  return e_to_r * from_exponent(shifted);
}
template <class T>
inline double exp(double x) {
  return std::exp(x);
}

/// 1 / (1 + e^-x), from an exponential that is at most 1. T as for exp().
template <class T, class F>
inline F sigmoid(F x) {
  const F e = exp<T>(F(-abs(x)));
  return (x < 0.0F ? e : F{} + 1.0F) / (1.0F + e);
}
template <class T>
inline double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

/// x sigmoid(x)
template <class T, class F>
inline F silu(F x) {
  return x * sigmoid<T>(x);
}
template <class T>
inline double silu(double x) {
  return x / (1 + std::exp(-x));
}

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

/// Combines results [2 kHalf] into the first of them: i with kHalf + i, and on with half as many.
template <int64_t kHalf, class A, class Combine>
void fold(A* results, Combine combine) {
#pragma omp simd
  for (int64_t i = 0; i < kHalf; ++i) results[i] = combine(results[i], results[kHalf + i]);
  if constexpr (kHalf > 1) fold<kHalf / 2>(results, combine);
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
    fold<kStride / 2>(results, combine);
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
