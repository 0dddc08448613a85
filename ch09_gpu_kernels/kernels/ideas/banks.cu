#include "kernels.h"

/// A transpose. Shared memory has 32 banks of four bytes; those of one bank come one by one.
namespace usp::ideas {

namespace {

constexpr int kTile = 32, kRowsAtOnce = kThreads / kTile;

// [direct]
__global__ void direct(Shape s, const float* x, float* y) {
  const int column = static_cast<int>(blockIdx.x * kTile + threadIdx.x % kTile);
  for (int i = static_cast<int>(threadIdx.x) / kTile; i < kTile; i += kRowsAtOnce) {
    const int row = static_cast<int>(blockIdx.y) * kTile + i;
    if (row >= s.rows || column >= s.columns) continue;
    y[int64_t{column} * s.rows + row] = x[int64_t{row} * s.columns + column];
  }
}
// [direct]

// [through_shared]
/// Lines of the tile are `line` numbers long. Swizzled: the columns of a row change places.
template <int line, bool swizzled>
__global__ void through_shared(Shape s, const float* x, float* y) {
  __shared__ float tile[kTile][line];
  const int lane = static_cast<int>(threadIdx.x) % kTile,
            first = static_cast<int>(threadIdx.x) / kTile;
  const int top = static_cast<int>(blockIdx.y) * kTile, left = static_cast<int>(blockIdx.x) * kTile;
  for (int i = first; i < kTile; i += kRowsAtOnce) {
    if (top + i >= s.rows || left + lane >= s.columns) continue;
    tile[i][swizzled ? lane ^ i : lane] = x[int64_t{top + i} * s.columns + left + lane];
  }
  __syncthreads();
  for (int i = first; i < kTile; i += kRowsAtOnce) {
    if (left + i >= s.columns || top + lane >= s.rows) continue;
    y[int64_t{left + i} * s.rows + top + lane] = tile[lane][swizzled ? i ^ lane : i];
  }
}
// [through_shared]

int64_t tiles(Shape s) { return ceil_div(s.rows, kTile) * ceil_div(s.columns, kTile); }

/// That a row of a whole tile lies in: five where it begins within one.
int64_t sectors(Shape s) { return s.columns % 8 == 0 && s.rows % 8 == 0 ? 4 : 5; }

/// A column of a tile lies in one bank, unless lines or places shift it.
template <int line, bool swizzled>
Counts predict(Shape s) {
  return {.bytes = 2 * tiles(s) * kTile * sectors(s) * kSector,
          .bank_conflicts = line == kTile && !swizzled ? tiles(s) * kTile * (kTile - 1) : 0,
          .barriers = tiles(s)};
}

template <int line, bool swizzled>
void run(const cuda::Queue& queue, const Data& d) {
  launch(through_shared<line, swizzled>,
         {{ceil_div(d.shape.columns, kTile), ceil_div(d.shape.rows, kTile)}}, queue, d.shape, d.x,
         d.y);
}

const Rung kRungs[] = {
    {"direct", "writes go to 32 places", 75,
     [](Shape s) -> Counts { return {.bytes = tiles(s) * kTile * (sectors(s) + kTile) * kSector}; },
     [](const cuda::Queue& queue, const Data& d) {
       launch(direct, {{ceil_div(d.shape.columns, kTile), ceil_div(d.shape.rows, kTile)}}, queue,
              d.shape, d.x, d.y);
     }},
    {"in_shared", "a tile turns in shared memory", 75, predict<32, false>, run<32, false>},
    {"padded", "lines of 33", 75, predict<33, false>, run<33, false>},
    {"swizzled", "lines of 32, columns change places", 75, predict<32, true>, run<32, true>},
};

}  // namespace

const Ideas kBanks{"banks", kRungs};

}  // namespace usp::ideas
