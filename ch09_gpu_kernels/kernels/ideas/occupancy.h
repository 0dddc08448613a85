#pragma once

#include <algorithm>
#include <cstdint>

/// How many blocks a multiprocessor holds at once.
namespace usp::ideas {

/// What a multiprocessor has. The defaults are those of compute capability 9.0, as the tables of
/// the CUDA C++ Programming Guide have them.
struct Multiprocessor {
  int64_t threads = 2048, blocks = 32, registers = 65536;
  int64_t shared_bytes = 228 << 10;
  int64_t reserved_bytes = 1 << 10;  ///< of shared memory, which each block takes for the system
};

/// What a block takes: its threads, registers of each, and shared memory.
struct Block {
  int64_t threads, registers, shared_bytes;
};

/// The fewest that threads, registers or shared memory allow. A warp gets registers by 256.
constexpr int64_t blocks_held(const Block& block, const Multiprocessor& limits = {}) {
  const auto up = [](int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; };
  const int64_t warps = up(block.threads, 32) / 32;
  const int64_t warps_by_registers = limits.registers / up(block.registers * 32, 256);
  return std::min({limits.blocks, limits.threads / (warps * 32), warps_by_registers / warps,
                   limits.shared_bytes / (block.shared_bytes + limits.reserved_bytes)});
}

}  // namespace usp::ideas
