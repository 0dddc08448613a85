#include "cpu/microkernel.h"

#if defined(USP_EMULATE_AMX)
#include "amx_emulation.h"  // of the tests
#define USP_AMX
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define USP_AMX
#endif

/// Products of bf16 with f32 sums: by matrix registers where there are any (AMX), else by vectors.
namespace usp::cpu {

namespace {

typedef float Sums __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Pairs __attribute__((vector_size(64), aligned(4), may_alias));

/// sums += a b, of both numbers of a pair.
void add_products(Sums& sums, const Pairs& a, const Pairs& b) {
#if defined(__AVX512BF16__)
  sums = _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#else
  const uint32_t upper = 0xFFFF0000;
  sums += (Sums)(a << 16) * (Sums)(b << 16) + (Sums)(a & upper) * (Sums)(b & upper);
#endif
}

/// 8 rows of two vectors are 16 accumulators of the 32 that AVX-512 has.
constexpr int64_t kVectorRows = 8;

/// kVectorRows rows of multiply_tile().
void multiply_rows(int64_t depth, const bf16* a, int64_t a_row, const bf16* panel, float* c,
                   int64_t c_row, bool accumulate) {
  Sums sums[kVectorRows][2] = {};
  if (accumulate) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kVectorRows; ++i) {
      const Sums* row = reinterpret_cast<const Sums*>(c + i * c_row);
      sums[i][0] = row[0];
      sums[i][1] = row[1];
    }
  }
  // Three row pointers, for rows 0-2, 3-5, 6 and 7: see microkernel.cpp.
  const bf16* rows[3] = {a, a + 3 * a_row, a + 6 * a_row};
  const Pairs* b = reinterpret_cast<const Pairs*>(panel);
  for (int64_t k = 0; k < depth; k += 2, b += 2) {
    const Pairs b0 = b[0], b1 = b[1];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kVectorRows; ++i) {
      const Pairs pair = Pairs{} + *reinterpret_cast<const Pair*>(rows[i / 3] + i % 3 * a_row);
      add_products(sums[i][0], pair, b0);
      add_products(sums[i][1], pair, b1);
    }
    for (const bf16*& row : rows) row += 2;
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < kVectorRows; ++i) {
    Sums* row = reinterpret_cast<Sums*>(c + i * c_row);
    row[0] = sums[i][0];
    row[1] = sums[i][1];
  }
}

#if defined(USP_AMX)

/// What ldtilecfg reads: all eight registers in full, 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTileConfig;

/// Whether there are such registers and this process may use them: Linux wants to be asked first.
bool has_tiles() {
#if defined(USP_EMULATE_AMX)
  return true;
#else
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of asm/prctl.h, which may be older
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#endif
}

/// multiply_tile() in registers 0-3 for c, 4 and 5 for a, 6 and 7 for b: every load of a or b
/// serves two products, and four sums hide a product's latency. A row of b is 16 pairs.
void multiply_tiles(int64_t depth, const bf16* a, int64_t a_row, const bf16* panel, float* c,
                    int64_t c_row, bool accumulate) {
  // Strides in bytes. GCC 12 does not know that the loads read memory: stores must come before.
  const int64_t a_bytes = a_row * 2, c_bytes = c_row * 4, b_bytes = kTileColumns<bf16> * 4;
  asm volatile("" ::: "memory");
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    _tile_loadd(2, c + 16 * c_row, c_bytes);
    _tile_loadd(3, c + 16 * c_row + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += 32, a += 32, panel += 32 * kTileColumns<bf16>) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(5, a + 16 * a_row, a_bytes);
    _tile_loadd(6, panel, b_bytes);
    _tile_loadd(7, panel + 32, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  _tile_stored(2, c + 16 * c_row, c_bytes);
  _tile_stored(3, c + 16 * c_row + 16, c_bytes);
}

#endif

}  // namespace

void multiply_tile(int64_t depth, const bf16* a, int64_t a_row, const bf16* panel, float* c,
                   int64_t c_row, bool accumulate) {
#if defined(USP_AMX)
  if (has_tiles()) return multiply_tiles(depth, a, a_row, panel, c, c_row, accumulate);
#endif
  for (int64_t i = 0; i < kTileRows<bf16>; i += kVectorRows) {
    multiply_rows(depth, a + i * a_row, a_row, panel, c + i * c_row, c_row, accumulate);
  }
}

TileRegisters<bf16>::TileRegisters() {
#if defined(USP_AMX)
  if (has_tiles()) _tile_loadconfig(&kTileConfig);
#endif
}
TileRegisters<bf16>::~TileRegisters() {
#if defined(USP_AMX)
  if (has_tiles()) _tile_release();
#endif
}

}  // namespace usp::cpu
