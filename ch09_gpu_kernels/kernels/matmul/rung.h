#pragma once

#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "ladder.h"

/// What the files with kernels share.
namespace usp::ladder {

using cuda::ceil_div;

/// A block for each tile of c.
template <class T>
cuda::Grid grid_of(const Product<T>& p, int tile) {
  return {ceil_div(p.n, tile), ceil_div(p.m, tile)};
}

/// Cost where a kernel reads each tile of a and b once, and asks `of_c` times for a byte of c.
inline Cost cost_of_tile(int64_t rows, int64_t columns, int64_t k, int64_t bytes,
                         int64_t of_c = 1) {
  return {((rows + columns) * k + of_c * rows * columns) * bytes, 2 * rows * columns * k};
}

}  // namespace usp::ladder
