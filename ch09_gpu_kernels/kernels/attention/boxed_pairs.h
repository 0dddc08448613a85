#pragma once

#include "backward.h"
#include "boxes.h"

/// What both passes backward share on Hopper: each of two groups keeps rows of two tensors, boxes
/// of two others pass by.
namespace usp::attention {

/// Rows of a group, and of a tile that passes by.
inline constexpr int kGroupRows = kOwnRows / kGroups;

/// Maps of the operands; rows: what backward keeps of a tile's queries is one row.
struct BackwardMaps {
  CUtensorMap q, k, v, dout, rows;
};

/// Maps of all that backward brings as boxes, in boxes of a group's rows.
inline BackwardMaps maps_of(const Gradients<bf16>& g) {
  const Problem<bf16>& p = g.of;
  constexpr int kNumbers = kGroupRows * sizeof(*g.rows) / sizeof(float);
  const auto* const numbers = reinterpret_cast<const float*>(g.rows);
  const int64_t tiles = int64_t{p.samples} * p.heads * g.rows_of(p.queries) / kGroupRows;
  return {map_of(p, p.q, p.queries, p.heads, p.of_q, kGroupRows),
          map_of(p, p.k, p.keys, p.kv_heads, p.of_k, kGroupRows),
          map_of(p, p.v, p.keys, p.kv_heads, p.of_v, kGroupRows),
          map_of(p, g.dout, p.queries, p.heads, g.of_dout, kGroupRows),
          p.maps->of({numbers, cuda::tensor_map_type(numbers), tiles, kNumbers, kNumbers, 1,
                      kNumbers, CU_TENSOR_MAP_SWIZZLE_NONE})};
}

/// Shared memory of a block: its groups' rows, stages of tiles of two tensors and of what backward
/// keeps of queries, barriers.
template <int width>
struct BoxedPairs {
  using Row = Gradients<bf16>::Row;  ///< what is kept of a query

  static constexpr int kStages = 2, kPanel = kGroupRows * kRowBytes;
  static constexpr int kTile = width / kDepth * kPanel;
  static constexpr int kStage = 2 * kTile + kGroupRows * static_cast<int>(sizeof(Row));
  static constexpr int kBarriersAt = 2 * kGroups * kTile + kStages * kStage;
  static constexpr int kBytes =
      kBarriersAt + (1 + 2 * kStages) * static_cast<int>(sizeof(cuda::Barrier));

  char* shared;

  /// Rows of one tensor, 0 or 1: a group's own, and those that pass by.
  __device__ char* own(int tensor, int group) const {
    return shared + (tensor * kGroups + group) * kTile;
  }
  __device__ char* tile(int step, int tensor) const {
    return shared + 2 * kGroups * kTile + step % kStages * kStage + tensor * kTile;
  }
  /// Numbers kept of the rows that pass by, where these are queries.
  __device__ Row* rows(int step) const { return reinterpret_cast<Row*>(tile(step, 2)); }
  __device__ cuda::Barrier& owned() const {
    return *reinterpret_cast<cuda::Barrier*>(shared + kBarriersAt);
  }
  __device__ cuda::Barrier& full(int step) const { return (&owned())[1 + step % kStages]; }
  __device__ cuda::Barrier& empty(int step) const { return (&full(step))[kStages]; }

  /// By one thread. So many arrivals give a stage back.
  __device__ void init(int arrivals) const {
    owned().init(1);
    for (int i = 0; i < kStages; ++i) {
      full(i).init(1);
      empty(i).init(arrivals);
    }
    cuda::fence_barrier_init();
  }

  /// Both groups' rows of x and y from `row` on, channels from `column` on.
  __device__ void bring_own(const CUtensorMap& x, const CUtensorMap& y, const Shape& shape,
                            int sample, int row, int column) const {
    owned().arrive_expect(2 * kGroups * kTile);
    for (int group = 0; group < kGroups; ++group) {
      const int first = row + group * kGroupRows;
      bring_boxes<width, kGroupRows>(own(0, group), x, &owned(), shape, sample, first, column);
      bring_boxes<width, kGroupRows>(own(1, group), y, &owned(), shape, sample, first, column);
    }
  }
  /// The same rows of both for a step, whose stage expects them.
  __device__ void bring_tiles(int step, const CUtensorMap& x, const CUtensorMap& y,
                              const Shape& shape, int sample, int row, int column) const {
    bring_boxes<width, kGroupRows>(tile(step, 0), x, &full(step), shape, sample, row, column);
    bring_boxes<width, kGroupRows>(tile(step, 1), y, &full(step), shape, sample, row, column);
  }
};

/// One thread brings the tiles of all steps, as soon as both groups have given a stage back:
/// bring(step) asks for `bytes` bytes.
template <int width, class Bring>
__device__ void bring_steps(const BoxedPairs<width>& place, int steps, unsigned bytes,
                            const Bring& bring) {
  for (int step = 0; step < steps; ++step) {
    place.empty(step).wait((step / BoxedPairs<width>::kStages & 1) ^ 1);
    place.full(step).arrive_expect(bytes);
    bring(step);
  }
}

/// Registers of a group's products: scores, which become weights; gradients of these, which become
/// gradients of scores; both as products take them.
struct Scores {
  float s[kGroupRows / 2] = {}, ds[kGroupRows / 2] = {};
  uint32_t weights[kGroupRows / 16][4] = {}, dscores[kGroupRows / 16][4] = {};

  /// Asks for both of a step, each from the group's rows and the tile of one tensor.
  template <int width>
  __device__ void begin(const BoxedPairs<width>& place, int group, int step) {
    cuda::wgmma_fence(s, ds);
    multiply<width>(s, place.own(0, group), place.tile(step, 0));
    multiply<width>(ds, place.own(1, group), place.tile(step, 1));
  }

 private:
  template <int width>
  __device__ static void multiply(float (&d)[kGroupRows / 2], const char* own, const char* tile) {
    USP_UNROLL
    for (int i = 0; i < width / 16; ++i) {
      const int at = i / 4 * BoxedPairs<width>::kPanel + i % 4 * 32;
      cuda::wgmma(d, cuda::descriptor(own + at, cuda::Swizzle::bytes128, 0, 1024),
                  cuda::descriptor(tile + at, cuda::Swizzle::bytes128, 0, 1024), i > 0);
    }
    cuda::wgmma_commit();
  }
};

/// Asks for the factors times the tile's rows, to be added to the gradient.
template <int registers>
__device__ void begin_sum(float (&gradient)[registers], uint32_t (&factors)[kGroupRows / 16][4],
                          const char* tile) {
  cuda::wgmma_fence(gradient, factors[0], factors[1], factors[2], factors[3]);
  USP_UNROLL
  for (int i = 0; i < kGroupRows / 16; ++i) {
    cuda::wgmma<1>(gradient, factors[i],
                   cuda::descriptor(tile + i * 16 * kRowBytes, cuda::Swizzle::bytes128,
                                    BoxedPairs<2 * registers>::kPanel, 1024),
                   true);
  }
  cuda::wgmma_commit();
}

/// Numbers become factors: bf16, in the registers in which a product takes its left operand.
__device__ inline void pack_all(uint32_t (&factors)[kGroupRows / 16][4],
                                const float (&x)[kGroupRows / 2]) {
  USP_UNROLL
  for (int i = 0; i < kGroupRows / 16; ++i) pack(factors[i], x, i);
}

/// Does each query of a tile see all keys of a group, from `first` on?
__device__ inline bool all_see(const Gradients<bf16>::Row* rows, int first) {
  return Stretch{rows[kGroupRows - 1].seen.from, rows[0].seen.to}.holds(first, first + kGroupRows);
}
/// Scores of queries that do not see a thread's keys become -inf. Rows are those of its registers.
__device__ inline void mask_queries(float (&s)[kGroupRows / 2], int key,
                                    const Gradients<bf16>::Row* rows) {
  USP_UNROLL
  for (int i = 0; i < kGroupRows / 2; ++i) {
    const int own = key + i / 2 % 2 * 8;
    const Stretch seen = rows[i / 4 * 8 + i % 2].seen;
    if (!seen.holds(own, own + 1)) s[i] = -INFINITY;
  }
}

}  // namespace usp::attention
