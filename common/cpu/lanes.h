#pragma once

/// The loops of simd.h, which includes this file, over registers full of numbers.
namespace usp::cpu {
inline namespace USP_SIMD {

/// `count` consecutive elements from `first` on: as many as a register has lanes, or fewer at the
/// end of a row.
struct Lanes {
  int64_t first, count;
};

}  // namespace USP_SIMD
}  // namespace usp::cpu

#include USP_LANES  // the registers of one instruction set

namespace usp::cpu {
inline namespace USP_SIMD {

/// The lanes from `first` on that lie before `end`.
inline Lanes lanes_before(int64_t first, int64_t end) {
  return {first, std::min(kLanes, end - first)};
}

/// simd_loop() over Lanes.
template <class Body, class... Next>
void lanes_loop(int64_t count, Body body, Next*... next) {
  const int64_t whole = count - count % kStride;
  for (int64_t begin = 0; begin < whole; begin += kStride) {
    (prefetch(next + begin), ...);
#pragma GCC unroll 8
    for (int64_t i = begin; i < begin + kStride; i += kLanes) body(Lanes{i, kLanes});
  }
  for (int64_t i = whole; i < count; i += kLanes) body(lanes_before(i, count));
}

/// simd_reduce() over Lanes, with kStride partial results, combined in the same order.
template <class Term, class Combine, class... Next>
float lanes_reduce(int64_t count, float start, Term term, Combine combine, Next*... next) {
  constexpr int64_t kRegisters = kStride / kLanes;
  // All loops over registers are unrolled: GCC would keep the results in memory.
  Floats results[kRegisters];
#pragma GCC unroll 8
  for (int64_t k = 0; k < kRegisters; ++k) results[k] = Floats{} + start;
  const int64_t whole = count - count % kStride;
  for (int64_t begin = 0; begin < whole; begin += kStride) {
    (prefetch(next + begin), ...);
#pragma GCC unroll 8
    for (int64_t k = 0; k < kRegisters; ++k) {
      results[k] = combine(results[k], term(Lanes{begin + k * kLanes, kLanes}));
    }
  }
#pragma GCC unroll 8
  for (int64_t k = 0; k < kRegisters; ++k) {
    if (whole + k * kLanes >= count) break;
    const Lanes lanes = lanes_before(whole + k * kLanes, count);
    results[k] = select(lanes, combine(results[k], term(lanes)), results[k]);
  }
#pragma GCC unroll 4
  for (int64_t half = kRegisters / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < half; ++k) results[k] = combine(results[k], results[k + half]);
  }
  Floats result = results[0];
#pragma GCC unroll 4
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    result = combine(result, upper_half(result, half));
  }
  return first_lane(result);
}

}  // namespace USP_SIMD
}  // namespace usp::cpu
