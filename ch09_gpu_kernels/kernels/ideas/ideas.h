#pragma once

#include <cstdint>
#include <span>

namespace usp::cuda {
struct Queue;
}

/// Small ladders of one idea each: a file has a kernel that wastes something, and those that do
/// not.
namespace usp::ideas {

/// Shape of a matrix; a vector has one row.
struct Shape {
  int rows, columns;

  constexpr int64_t n() const { return int64_t{rows} * columns; }  ///< elements
};

/// In the device's memory, f32. Rows follow each other, and each array begins at a multiple of 32
/// bytes.
struct Data {
  Shape shape;
  const float *x, *z;  ///< rows x columns
  float* y;            ///< as many; of a reduction the first alone
  float* scratch;      ///< four times as many
};

/// What all kernels of a rung ask for together. Where the sizes are multiples of 32 it is what the
/// emulator counts; elsewhere bytes are the most.
struct Counts {
  int64_t bytes = 0;               ///< of global memory, in sectors of 32
  int64_t flops = 0;               ///< exp counts as one; the emulator counts none of them
  int64_t bank_conflicts = 0;      ///< turns that accesses to shared memory take beyond their first
  int64_t barriers = 0;            ///< __syncthreads, a block at a time
  int64_t divergent_branches = 0;  ///< branches at which lanes of a warp part
  int64_t launches = 1;
  /// Blocks and warps that a multiprocessor of an H100 holds at once, with as many registers as the
  /// rung allows, and bytes that its threads have asked for before one of them waits. 0: not what
  /// it is about.
  int64_t blocks_held = 0, warps_held = 0, bytes_in_flight = 0;
};

/// A kernel, or several in a row, and what it is there for. run() queues it.
struct Rung {
  const char *name, *idea;
  int capability;  ///< of the GPUs on which it runs, and of all later ones
  Counts (*predict)(Shape shape);
  void (*run)(const cuda::Queue& queue, const Data& data);
};

/// The rungs of a file, the plainest first.
struct Ideas {
  const char* name;  ///< of the file
  std::span<const Rung> rungs;
};

extern const Ideas kPrimer, kLayerNorm, kCoalescing, kBanks, kDivergence, kOccupancy, kFusion,
    kReduction;

/// All of them, in the order in which the page has them.
std::span<const Ideas* const> all();

}  // namespace usp::ideas
