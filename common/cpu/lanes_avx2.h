#pragma once

#include <immintrin.h>

#include <algorithm>

/// The registers of AVX2 with FMA, for lanes.h, which includes this file.
namespace usp::cpu {
inline namespace USP_SIMD {

using Floats = __m256;
inline constexpr int64_t kLanes = 8;

/// All bits of the lanes that exist.
inline __m256i bits_of(Lanes i) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(i.count)), lane);
}
inline bool all_exist(Lanes i) { return i.count == kLanes; }

inline Floats load(const float* x, Lanes i) {
  return all_exist(i) ? _mm256_loadu_ps(x + i.first) : _mm256_maskload_ps(x + i.first, bits_of(i));
}
inline Floats load(const bf16* x, Lanes i) {
  const auto load_all = [](const bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
  };
  if (all_exist(i)) return load_all(x + i.first);
  bf16 some[kLanes] = {};
  std::copy_n(x + i.first, i.count, some);
  return load_all(some);
}
inline void store(float* y, Lanes i, Floats value) {
  if (all_exist(i))
    _mm256_storeu_ps(y + i.first, value);
  else
    _mm256_maskstore_ps(y + i.first, bits_of(i), value);
}
/// As in bf16's constructor.
inline void store(bf16* y, Lanes i, Floats value) {
  const __m256i word = (__m256i)value;
  const __m256i odd = _mm256_and_si256(_mm256_set1_epi32(1), _mm256_srli_epi32(word, 16));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(word, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x400000));
  const Floats nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  const auto bits = (__m256i)_mm256_blendv_ps((Floats)up, (Floats)quiet, nan);
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  // Each half of the register is packed for itself: four words in the first quarter, four in the
  // third.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0b00'00'10'00);
  const __m128i rounded = _mm256_castsi256_si128(words);
  if (all_exist(i)) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i.first), rounded);
  } else {
    bf16 all[kLanes];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(all), rounded);
    std::copy_n(all, i.count, y + i.first);
  }
}

inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats abs(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(b, a); }
inline Floats at_least(Floats x, float bound) { return _mm256_max_ps(Floats{} + bound, x); }
inline Floats from_exponent(Floats x) { return (Floats)_mm256_slli_epi32((__m256i)x, 23); }
inline Floats hide_unseen(Floats score, const int32_t* keys, Lanes i, Window window) {
  const __m256i key = all_exist(i)
                          ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i.first))
                          : _mm256_maskload_epi32(keys + i.first, bits_of(i));
  const __m256i earlier = _mm256_cmpgt_epi32(_mm256_set1_epi32(window.from), key);
  const __m256i later = _mm256_cmpgt_epi32(key, _mm256_set1_epi32(window.to));
  const Floats unseen = (Floats)_mm256_or_si256(earlier, later);
  return _mm256_blendv_ps(score, Floats{} - kInfinity<float>, unseen);
}

/// a in the lanes that exist, b in the others.
inline Floats select(Lanes i, Floats a, Floats b) {
  return _mm256_blendv_ps(b, a, (Floats)bits_of(i));
}
/// Lane l holds lane l + half, of the first 2 * half lanes.
inline Floats upper_half(Floats x, int64_t half) {
  return half == 4   ? _mm256_permute2f128_ps(x, x, 0x11)
         : half == 2 ? _mm256_permute_ps(x, 0b00'00'11'10)
                     : _mm256_permute_ps(x, 0b00'00'00'01);
}
inline float first_lane(Floats x) { return _mm256_cvtss_f32(x); }

}  // namespace USP_SIMD
}  // namespace usp::cpu
