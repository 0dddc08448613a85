#pragma once

#include <algorithm>
#include <utility>

#include "boxes.h"
#include "cuda/device_limits.h"

/// The kernel of two warpgroups that take turns, for any softmax. Its blocks stay: while warpgroups
/// write what they have, the next queries and keys are on their way.
namespace usp::attention {

inline constexpr int kQueries = 128, kKeys = 128, kStages = 2;
/// 128 rows of 64 channels: a box.
inline constexpr int kPanel = 128 * kRowBytes;

/// Shared memory of a block: a tile of queries, stages of keys and of values, barriers.
template <int width, int value_width>
struct Place {
  static constexpr int kTile = width / kDepth * kPanel, kValues = value_width / kDepth * kPanel;
  static constexpr int kBarriersAt = kTile + kStages * (kTile + kValues);
  static constexpr int kBytes =
      kBarriersAt + (2 + 4 * kStages) * static_cast<int>(sizeof(cuda::Barrier));

  char* queries;

  __device__ char* keys(int stage) const { return queries + (1 + stage) * kTile; }
  __device__ char* values(int stage) const { return keys(kStages) + stage * kValues; }
  __device__ cuda::Barrier* loaded() const {
    return reinterpret_cast<cuda::Barrier*>(queries + kBarriersAt);
  }
  __device__ cuda::Barrier* queries_left() const { return loaded() + 1; }
  __device__ cuda::Barrier& keys_full(int stage) const { return loaded()[2 + stage]; }
  __device__ cuda::Barrier& keys_empty(int stage) const { return keys_full(kStages + stage); }
  __device__ cuda::Barrier& values_full(int stage) const { return keys_full(2 * kStages + stage); }
  __device__ cuda::Barrier& values_empty(int stage) const { return keys_full(3 * kStages + stage); }

  /// By one thread. Both groups give a stage back, or the queries, and one copy fills it.
  __device__ void init() const {
    loaded()->init(1);
    queries_left()->init(kGroups);
    for (int i = 0; i < kStages; ++i) {
      keys_full(i).init(1);
      values_full(i).init(1);
      keys_empty(i).init(kGroups);
      values_empty(i).init(kGroups);
    }
    cuda::fence_barrier_init();
  }
};

/// Maps of the three operands, [samples, rows, channels of all heads].
struct Maps {
  CUtensorMap q, k, v;
};

/// What of a block's turns is over: tiles that have been in the stages, and queries.
struct Past {
  int tiles = 0, queries = 0;

  /// Where the tile of a step lies, and how often something has lain there, as a barrier counts.
  __device__ int stage(int step) const { return (tiles + step) % kStages; }
  __device__ int parity(int step) const { return (tiles + step) / kStages & 1; }
  __device__ void add(const Tiles& turn) {
    tiles += turn.count;
    queries += turn.count > 0;
  }
};

/// use(turn, its head, its tiles, what is over) for each turn of this block.
template <class F>
__device__ void each_turn(const Problem<bf16>& p, const F& use) {
  const int turns = p.turns(kQueries), blocks = static_cast<int>(gridDim.x);
  Past past;
  for (int round = 0;; ++round) {
    const int number = p.number_of_turn(round, static_cast<int>(blockIdx.x), blocks);
    if (number >= turns) return;
    const Turn turn = p.turn(number, kQueries);
    const Head<bf16> head(p, turn.head);
    const Tiles tiles = p.tiles_seen(head.sample, turn.first, kQueries, kKeys);
    use(turn, head, tiles, past);
    past.add(tiles);
  }
}

/// One thread brings all tiles, as soon as both groups have given a stage back.
template <int width, int value_width>
__device__ void bring_all(const Place<width, value_width>& place, const Maps& maps,
                          const Problem<bf16>& p, const Head<bf16>& head, int top,
                          const Tiles& tiles, const Past& past) {
  const auto bring = [&](auto channels, char* to, const CUtensorMap& map, cuda::Barrier* full,
                         int column, int row) {
    full->arrive_expect(channels / kDepth * kPanel);
    bring_boxes<channels, kKeys>(to, map, full, p, head.sample, row, column);
  };
  const std::integral_constant<int, width> of_key;
  const std::integral_constant<int, value_width> of_value;
  const int query_column = head.number * p.of_q.head, key_column = head.kv * p.of_k.head,
            value_column = head.kv * p.of_v.head;
  if (tiles.count > 0) {
    place.queries_left()->wait((past.queries & 1) ^ 1);
    bring(of_key, place.queries, maps.q, place.loaded(), query_column, top);
  }
  for (int step = 0; step < tiles.count; ++step) {
    const int stage = past.stage(step), parity = past.parity(step) ^ 1, row = tiles[step] * kKeys;
    place.keys_empty(stage).wait(parity);
    bring(of_key, place.keys(stage), maps.k, &place.keys_full(stage), key_column, row);
    place.values_empty(stage).wait(parity);
    bring(of_value, place.values(stage), maps.v, &place.values_full(stage), value_column, row);
  }
}

/// A warpgroup with 64 queries.
template <int width, int value_width, class Softmax>
struct Group {
  Place<width, value_width> place;
  Past past;
  int group;
  Stretch seen[2], seen_by_all;  // by a thread's rows; by each of the group's
  float scale;
  float s[kKeys / 2] = {}, o[value_width / 2] = {};
  uint32_t weights[kKeys / 16][4] = {};
  Softmax softmax = {};

  /// Values come after the keys of their tile.
  __device__ void wait_for_values(int step) {
    place.values_full(past.stage(step)).wait(past.parity(step));
  }

  /// Threads have touched registers that the next products use. Nothing may branch from here to
  /// these, or the assembler puts fences of its own before them.
  __device__ void fence() {
    [this]<size_t... i>(std::index_sequence<i...>) { cuda::wgmma_fence(s, o, weights[i]...); }
    (std::make_index_sequence<kKeys / 16>{});
  }

  /// Asks for the scores of a step's tile.
  __device__ void begin_scores(int step) {
    const char* const rows = place.queries + group * kPanel / kGroups;
    const char* const keys = place.keys(past.stage(step));
    USP_UNROLL
    for (int i = 0; i < width / 16; ++i) {
      const int at = i / 4 * kPanel + i % 4 * 32;
      cuda::wgmma(s, cuda::descriptor(rows + at, cuda::Swizzle::bytes128, 0, 1024),
                  cuda::descriptor(keys + at, cuda::Swizzle::bytes128, 0, 1024), i > 0);
    }
    cuda::wgmma_commit();
  }

  /// Asks for the weights of a tile times its values, to be added to what came before.
  __device__ void begin_output(int step) {
    const char* const values = place.values(past.stage(step));
    USP_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      cuda::wgmma<1>(
          o, weights[i],
          cuda::descriptor(values + i * 16 * kRowBytes, cuda::Swizzle::bytes128, kPanel, 1024),
          step > 0 || i > 0);
    }
    cuda::wgmma_commit();
  }

  /// The scores of a step are there: they become weights in s. After the last one, the queries are
  /// no longer needed.
  __device__ void take_scores(int step, const Tiles& tiles) {
    const int first = tiles[step] * kKeys;
    if (is_first_of_group()) place.keys_empty(past.stage(step)).arrive();
    if (is_first_of_group() && step + 1 == tiles.count) place.queries_left()->arrive();
    if (!seen_by_all.holds(first, first + kKeys)) {
      mask(s, first + cuda::wgmma_column(static_cast<int>(threadIdx.x)), seen);
    }
    softmax.take(s, scale);
  }

  /// Weights go where a product takes them, which the one before must have left.
  __device__ void pack_weights() {
    USP_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) pack(weights[i], s, i);
  }

  // [turns]
  /// All tiles of a turn. Groups ask for products in turns: while one takes the softmax of a tile,
  /// the tensor cores work for the other, and for its own output of the tile before.
  __device__ void run(const Tiles& tiles) {
    place.loaded()->wait(past.queries & 1);
    place.keys_full(past.stage(0)).wait(past.parity(0));
    fence();
    begin_scores(0);
    cuda::wgmma_wait<0>(s);
    take_scores(0, tiles);
    pack_weights();
    if (group == 1 && tiles.count > 1) cuda::named_arrive(1, kGroups * kGroup);
    for (int step = 1; step < tiles.count; ++step) {
      cuda::named_barrier(1 + group, kGroups * kGroup);
      wait_for_values(step - 1);
      place.keys_full(past.stage(step)).wait(past.parity(step));
      fence();
      begin_scores(step);
      begin_output(step - 1);
      if (group == 0 || step + 1 < tiles.count) cuda::named_arrive(2 - group, kGroups * kGroup);
      cuda::wgmma_wait<1>(s);
      take_scores(step, tiles);
      cuda::wgmma_wait<0>(o);
      if (is_first_of_group()) place.values_empty(past.stage(step - 1)).arrive();
      softmax.rescale(o);
      pack_weights();
    }
    wait_for_values(tiles.count - 1);
    fence();
    begin_output(tiles.count - 1);
    cuda::wgmma_wait<0>(o);
    if (is_first_of_group()) place.values_empty(past.stage(tiles.count - 1)).arrive();
  }
  // [turns]
};

template <int width, int value_width, class Softmax>
__global__ void __launch_bounds__(kBlock, 1)
    pingpong_kernel(const __grid_constant__ Maps maps, Problem<bf16> p) {
  const Place<width, value_width> place{cuda::swizzled_shared()};
  if (threadIdx.x == 0) place.init();
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  if (group == kGroups) {
    cuda::fewer_registers<40>();
    if (!is_first_of_group()) return;
    each_turn(p,
              [&](const Turn& turn, const Head<bf16>& head, const Tiles& tiles, const Past& past) {
                bring_all(place, maps, p, head, turn.first, tiles, past);
              });
    return;
  }
  cuda::more_registers<232>();
  each_turn(p, [&](const Turn& turn, const Head<bf16>& head, const Tiles& tiles, const Past& past) {
    const int rows = kQueries / kGroups, first = turn.first + group * rows;
    const int row = first + cuda::wgmma_row(static_cast<int>(threadIdx.x) % kGroup);
    Group<width, value_width, Softmax> own{
        place,
        past,
        group,
        {p.seen_by(head.sample, row), p.seen_by(head.sample, row + 8)},
        p.seen_by_all(head.sample, first, rows),
        p.scale * kLog2e};
    if (tiles.count > 0) own.run(tiles);
    finish(p, head, row, p.queries, own.softmax, own.o);
    if constexpr (value_width < width) pad<width - value_width>(p, head, row);
  });
}

/// What looks up the tiles of a turn: both groups, and the thread that brings them.
inline constexpr int kWarpsThatLook = kGroups * kGroup / cuda::kWarp + 1;

/// Queues it. 128 queries of a head are a turn.
template <class Softmax>
void run_pingpong(const cuda::Queue& queue, const Problem<bf16>& p) {
  const CUtensorMap q = map_of(p, p.q, p.queries, p.heads, p.of_q, kQueries);
  const CUtensorMap k = map_of(p, p.k, p.keys, p.kv_heads, p.of_k, kKeys);
  const CUtensorMap v = map_of(p, p.v, p.keys, p.kv_heads, p.of_v, kKeys);
  const int blocks = p.blocks > 0 ? p.blocks : cuda::limits_of_this_device().multiprocessors;
  with_widths(p.width, [&](auto width, auto value_width) {
    launch(pingpong_kernel<width, value_width, Softmax>, std::min(blocks, p.turns(kQueries)),
           kBlock, Place<width, value_width>::kBytes, queue, Maps{q, k, v}, p);
  });
}

}  // namespace usp::attention
