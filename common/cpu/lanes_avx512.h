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

/// The registers of AVX-512, for lanes.h, which includes this file.
namespace usp::cpu {
inline namespace USP_SIMD {

using Floats = __m512;
inline constexpr int64_t kLanes = 16;

/// A bit for each of the lanes that exist.
inline __mmask16 bits_of(Lanes i) { return static_cast<__mmask16>((uint32_t{1} << i.count) - 1); }

inline Floats load(const float* x, Lanes i) {
  return _mm512_maskz_loadu_ps(bits_of(i), x + i.first);
}
inline Floats load(const bf16* x, Lanes i) {
  const __m256i bits = _mm256_maskz_loadu_epi16(bits_of(i), x + i.first);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
inline void store(float* y, Lanes i, Floats value) {
  _mm512_mask_storeu_ps(y + i.first, bits_of(i), value);
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
  _mm256_mask_storeu_epi16(y + i.first, bits_of(i), rounded);
}

inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats abs(Floats x) { return _mm512_abs_ps(x); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(b, a); }
inline Floats at_least(Floats x, float bound) { return _mm512_max_ps(Floats{} + bound, x); }
inline Floats from_exponent(Floats x) { return (Floats)_mm512_slli_epi32((__m512i)x, 23); }
inline Floats hide_unseen(Floats score, const int32_t* keys, Lanes i, Window window) {
  const __m512i key = _mm512_maskz_loadu_epi32(bits_of(i), keys + i.first);
  const __mmask16 begun = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(window.from));
  const __mmask16 seen = _mm512_mask_cmple_epi32_mask(begun, key, _mm512_set1_epi32(window.to));
  return _mm512_mask_mov_ps(Floats{} - kInfinity<float>, seen, score);
}

/// a in the lanes that exist, b in the others.
inline Floats select(Lanes i, Floats a, Floats b) { return _mm512_mask_mov_ps(b, bits_of(i), a); }
/// Lane l holds lane l + half, of the first 2 * half lanes.
inline Floats upper_half(Floats x, int64_t half) {
  return half == 8   ? _mm512_shuffle_f32x4(x, x, 0b00'00'11'10)
         : half == 4 ? _mm512_shuffle_f32x4(x, x, 0b00'00'00'01)
         : half == 2 ? _mm512_permute_ps(x, 0b00'00'11'10)
                     : _mm512_permute_ps(x, 0b00'00'00'01);
}
inline float first_lane(Floats x) { return _mm512_cvtss_f32(x); }

}  // namespace USP_SIMD
}  // namespace usp::cpu
