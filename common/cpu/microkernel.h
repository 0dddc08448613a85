#pragma once

#include <cstdint>

namespace usp::cpu {

/// Bytes of one SIMD register of the instruction set that the build targets.
#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

/// The tile of c that multiply_tile() keeps in registers: 6 rows of two SIMD vectors are 12
/// accumulators, which hide the latency of a multiply-add and leave 4 of 16 registers for a and b.
inline constexpr int64_t kTileRows = 6;
template <class T>
inline constexpr int64_t kTileColumns = 2 * kVectorBytes / static_cast<int64_t>(sizeof(T));

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// c [kTileRows, kTileColumns] = or += a [kTileRows, depth] panel [depth, kTileColumns]. Row i of a
/// begins at a + i * a_row, its elements are a_column apart; the panel is contiguous; rows of c are
/// c_row apart. T is float or double. Every element is one sum in index order, so splitting the
/// depth over several accumulating calls gives the same bits.
template <class T>
void multiply_tile(int64_t depth, const T* a, int64_t a_row, int64_t a_column, const T* panel, T* c,
                   int64_t c_row, bool accumulate);

}  // namespace usp::cpu
