#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

/// AMX in plain C++: those of its intrinsics that common/cpu/microkernel_bf16.cpp uses, as Intel
/// defines them, so that its blocking can be tested on any CPU. What would stop the CPU with an
/// illegal instruction stops the test.
namespace usp::cpu {

/// What a thread's eight tile registers hold, in the shape that the configuration gives them.
struct Tiles {
  int rows[8] = {}, row_bytes[8] = {};  // of no shape: not configured
  alignas(64) char data[8][16][64];

  void require(bool condition, const char* what) const {
    if (condition) return;
    std::fprintf(stderr, "AMX: %s\n", what);
    std::abort();
  }
  template <class Element>
  Element& at(int tile, int row, int column) {
    return reinterpret_cast<Element*>(data[tile][row])[column];
  }
};
inline thread_local Tiles tiles;

inline void _tile_release() { tiles = {}; }
/// 64 bytes: palette, start row, 14 reserved, 16 widths in bytes of two bytes each, 16 heights.
inline void _tile_loadconfig(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  tiles.require(bytes[0] == 1 && bytes[1] == 0, "palette 1, start row 0");
  for (int i = 2; i < 16; ++i) tiles.require(bytes[i] == 0, "reserved bytes are 0");
  tiles = {};
  for (int tile = 0; tile < 8; ++tile) {
    tiles.row_bytes[tile] = bytes[16 + 2 * tile] + 256 * bytes[17 + 2 * tile];
    tiles.rows[tile] = bytes[48 + tile];
    tiles.require(tiles.row_bytes[tile] <= 64 && tiles.rows[tile] <= 16, "16 rows of 64 bytes");
  }
}
inline void _tile_zero(int tile) {
  tiles.require(tiles.rows[tile] > 0, "no configuration");
  std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
}
inline void _tile_loadd(int tile, const void* base, int64_t stride) {
  _tile_zero(tile);
  for (int row = 0; row < tiles.rows[tile]; ++row) {
    std::memcpy(tiles.data[tile][row], static_cast<const char*>(base) + row * stride,
                tiles.row_bytes[tile]);
  }
}
inline void _tile_stored(int tile, void* base, int64_t stride) {
  tiles.require(tiles.rows[tile] > 0, "no configuration");
  for (int row = 0; row < tiles.rows[tile]; ++row) {
    std::memcpy(static_cast<char*>(base) + row * stride, tiles.data[tile][row],
                tiles.row_bytes[tile]);
  }
}
/// c += a b, of pairs: b's row k holds elements 2k and 2k + 1 of every column.
inline void _tile_dpbf16ps(int c, int a, int b) {
  const int rows = tiles.rows[c], columns = tiles.row_bytes[c] / 4, pairs = tiles.rows[b];
  tiles.require(rows > 0 && pairs > 0, "no configuration");
  tiles.require(
      tiles.rows[a] == rows && tiles.row_bytes[a] == 4 * pairs && tiles.row_bytes[b] == 4 * columns,
      "shapes do not match");
  for (int i = 0; i < rows; ++i) {
    for (int k = 0; k < 2 * pairs; ++k) {
      for (int j = 0; j < columns; ++j) {
        tiles.at<float>(c, i, j) +=
            float(tiles.at<bf16>(a, i, k)) * float(tiles.at<bf16>(b, k / 2, 2 * j + k % 2));
      }
    }
  }
}

}  // namespace usp::cpu
