#pragma once

#if !defined(__clang__)  // GCC 12 warns of its own header
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

/// The operations of simd.h, which includes this file, on registers of AVX-512.
namespace usp::cpu {
inline namespace USP_SIMD {

using Floats = __m512;
inline constexpr int64_t kLanes = 16;

/// kLanes consecutive elements from `first` on, of which those exist whose bit is 1.
struct Lanes {
  int64_t first;
  __mmask16 exist = 0xFFFF;
};

inline Floats load(const float* x, Lanes i) { return _mm512_maskz_loadu_ps(i.exist, x + i.first); }
inline Floats load(const bf16* x, Lanes i) {
  const __m256i bits = _mm256_maskz_loadu_epi16(i.exist, x + i.first);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
inline void store(float* y, Lanes i, Floats value) {
  _mm512_mask_storeu_ps(y + i.first, i.exist, value);
}
/// As in bf16's constructor, only that a CPU which rounds by itself makes subnormal numbers 0.
inline void store(bf16* y, Lanes i, Floats value) {
#if defined(__AVX512BF16__)
  const auto rounded = (__m256i)_mm512_cvtneps_pbh(value);
#else
  const __m512i word = (__m512i)value, odd = _mm512_set1_epi32(1) & _mm512_srli_epi32(word, 16);
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i bits = _mm512_mask_or_epi32(up, nan, word, _mm512_set1_epi32(0x400000));
  const __m256i rounded = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
#endif
  _mm256_mask_storeu_epi16(y + i.first, i.exist, rounded);
}

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats abs(Floats x) { return _mm512_abs_ps(x); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(b, a); }
inline Floats at_least(Floats x, float bound) { return _mm512_max_ps(Floats{} + bound, x); }
inline Floats from_exponent(Floats x) { return (Floats)_mm512_slli_epi32((__m512i)x, 23); }
inline Floats hide_later(Floats score, const int32_t* keys, Lanes i, int32_t query) {
  const __m512i key = _mm512_maskz_loadu_epi32(i.exist, keys + i.first);
  const __mmask16 seen = _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(query));
  return _mm512_mask_mov_ps(Floats{} - kInfinity<float>, seen, score);
}

/// The lanes from `first` on that lie before `end`.
inline Lanes lanes_before(int64_t first, int64_t end) {
  return {first, static_cast<__mmask16>((uint32_t{1} << std::min(kLanes, end - first)) - 1)};
}
/// a where the bit is 1, else b.
inline Floats select(__mmask16 bits, Floats a, Floats b) { return _mm512_mask_mov_ps(b, bits, a); }
/// All lanes combined: l with l + 8, of the results l with l + 4, and so on.
template <class Combine>
float combine_lanes(Floats x, Combine combine) {
  x = combine(x, _mm512_shuffle_f32x4(x, x, 0b00'00'11'10));
  x = combine(x, _mm512_shuffle_f32x4(x, x, 0b00'00'00'01));
  x = combine(x, _mm512_permute_ps(x, 0b00'00'11'10));
  x = combine(x, _mm512_permute_ps(x, 0b00'00'00'01));
  return _mm512_cvtss_f32(x);
}

/// simd_loop() over Lanes.
template <class Body, class... Next>
void lanes_loop(int64_t count, Body body, Next*... next) {
  const int64_t whole = count - count % kStride;
  for (int64_t begin = 0; begin < whole; begin += kStride) {
    (prefetch(next + begin), ...);
#pragma GCC unroll 4
    for (int64_t i = begin; i < begin + kStride; i += kLanes) body(Lanes{i});
  }
  for (int64_t i = whole; i < count; i += kLanes) body(lanes_before(i, count));
}

/// simd_reduce() over Lanes, with kStride partial results, combined in the same order.
template <class Term, class Combine, class... Next>
float lanes_reduce(int64_t count, float start, Term term, Combine combine, Next*... next) {
  constexpr int64_t kRegisters = kStride / kLanes;
  // All loops over registers are unrolled: GCC would keep the results in memory.
  Floats results[kRegisters];
#pragma GCC unroll 4
  for (int64_t k = 0; k < kRegisters; ++k) results[k] = Floats{} + start;
  const int64_t whole = count - count % kStride;
  for (int64_t begin = 0; begin < whole; begin += kStride) {
    (prefetch(next + begin), ...);
#pragma GCC unroll 4
    for (int64_t k = 0; k < kRegisters; ++k) {
      results[k] = combine(results[k], term(Lanes{begin + k * kLanes}));
    }
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < kRegisters; ++k) {
    if (whole + k * kLanes >= count) break;
    const Lanes lanes = lanes_before(whole + k * kLanes, count);
    results[k] = select(lanes.exist, combine(results[k], term(lanes)), results[k]);
  }
  static_assert(kRegisters == 4);
  const Floats low = combine(results[0], results[2]), high = combine(results[1], results[3]);
  return combine_lanes(combine(low, high), combine);
}

}  // namespace USP_SIMD
}  // namespace usp::cpu
