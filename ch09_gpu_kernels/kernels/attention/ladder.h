#pragma once

#include <climits>
#include <span>

#include "cuda/tensor_maps.h"

namespace usp::cuda {
struct Queue;
}

/// Attention, from scores in memory to two warpgroups that take turns: each rung is a file with one
/// idea more. Two go backward.
namespace usp::attention {

using bf16 = __nv_bfloat16;  ///< CUDA's type

/// Channels of latent attention's heads, as it is trained: 64 of a key's carry positions, which
/// values do without.
inline constexpr int kWidestKeys = 192, kWidestValues = 128;
/// What a block of flash_2, or of its backward, takes of shared memory for such heads, at most:
/// some GPUs that run them have less.
inline constexpr int kSharedOfWidest = 128 << 10;

/// Ascending numbers of rows, in two runs at most: row 0 has `begin`, and those behind it count on,
/// until row `length` has `second`.
struct Ranges {
  int begin = 0, length = INT_MAX, second = 0;

  /// The number of a row.
  __host__ __device__ int operator[](int row) const {
    return row < length ? begin + row : second + (row - length);
  }
  /// How many of the first `count` rows have a number below this one.
  __host__ __device__ int below(int number, int count) const {
    const int first = count < length ? count : length;
    return within(number - begin, first) + within(number - second, count - first);
  }
  /// Does the second run begin inside rows first to end - 1?
  __host__ __device__ bool turns_in(int first, int end) const {
    return first < length && length < end;
  }

 private:
  __host__ __device__ static int within(int x, int most) { return x < 0 ? 0 : x < most ? x : most; }
};

/// Rows from `from` on, `to` not included; none if they are equal.
struct Stretch {
  int from, to;

  /// Does it hold all of these rows?
  __host__ __device__ bool holds(int first, int end) const { return from <= first && end <= to; }
};

/// Tiles that pass by a block: those that the mask empties are not among them.
struct Tiles {
  Ranges number{0, 0, 0};
  int count = 0;

  /// The tile of a step, from 0 to count - 1.
  __host__ __device__ int operator[](int step) const { return number[step]; }
  /// Is this tile one of them?
  __host__ __device__ bool holds(int tile) const {
    return number.below(tile + 1, count) > number.below(tile, count);
  }
  /// Adds the tiles of `size` rows that hold a row of the stretch. A second stretch begins no
  /// earlier than the first one did.
  __host__ __device__ void add(const Stretch& rows, int size) {
    const int begin = rows.from / size, end = (rows.to + size - 1) / size;
    const int next = count == 0 || begin > number[count - 1] ? begin : number[count - 1] + 1;
    if (rows.from >= rows.to || next >= end) return;
    if (count == 0) number = {next, end - next, 0};
    if (count > 0) number.second = next;
    count += end - next;
  }
};

/// What a block has to do: a head, counted over all samples, and queries from `first` on.
struct Turn {
  int head, first;
};

/// How much there is, and who sees whom. What reads `begins` is part of each kernel that asks, so
/// that a check of the kernel's accesses has it.
struct Shape {
  int samples, queries, keys;
  int heads, kv_heads;  ///< heads / kv_heads heads of queries share keys and values
  int width;            ///< channels of a head's queries and keys: 64, 128 or 192
  bool causal = false;  ///< a query sees keys up to its own position, of its document; else all
  Ranges query_at{}, key_at{};  ///< positions in a sample: of all rows, or of a piece of a ring's
  /// Causal: [samples, queries], the position at which each query's document begins. Without, a
  /// sample is one document.
  const int32_t* begins = nullptr;
  int splits = 1;  ///< of the keys of a single query: each part has blocks of its own

  /// Channels of a head's values and outputs.
  __host__ __device__ int value_width() const {
    return width < kWidestValues ? width : kWidestValues;
  }

  /// The keys that a query sees lie side by side, because positions ascend: this is the first one,
  __host__ __device__ __forceinline__ int seen_from(int sample, int query) const {
    if (!causal || begins == nullptr) return 0;
    return key_at.below(begins[int64_t{sample} * queries + query], keys);
  }
  /// and here they end. Neither decreases from a query to the next.
  __host__ __device__ int seen_to(int query) const {
    return causal ? key_at.below(query_at[query] + 1, keys) : keys;
  }
  /// Both; no keys for a query that is not there.
  __host__ __device__ __forceinline__ Stretch seen_by(int sample, int query) const {
    if (query >= queries) return {keys, keys};
    return {seen_from(sample, query), seen_to(query)};
  }
  /// The keys that all of `rows` queries from `first` on see, as far as there are queries.
  __host__ __device__ __forceinline__ Stretch seen_by_all(int sample, int first, int rows) const {
    const int last = (first + rows < queries ? first + rows : queries) - 1;
    return {seen_from(sample, last), seen_to(first)};
  }

  // [tiles_seen]
  /// The tiles of keys of which a block of queries sees any. What queries at consecutive positions
  /// see is one stretch.
  __host__ __device__ __forceinline__ Tiles tiles_seen(int sample, int first, int rows,
                                                       int tile) const {
    const int end = first + rows < queries ? first + rows : queries;
    const bool turns = query_at.turns_in(first, end);
    Tiles tiles;
    tiles.add({seen_from(sample, first), seen_to((turns ? query_at.length : end) - 1)}, tile);
    if (turns) tiles.add({seen_from(sample, query_at.length), seen_to(end - 1)}, tile);
    return tiles;
  }
  // [tiles_seen]
  // [turn]
  /// Turn of a block of `rows` queries, in the order in which they begin: the last queries first,
  /// of all heads. Under a causal mask they see the most keys, and what begins last is short.
  __host__ __device__ Turn turn(int block, int rows) const {
    const int all_heads = samples * heads, down = (queries + rows - 1) / rows;
    return {block % all_heads, (down - 1 - block / all_heads) * rows};
  }
  // [turn]
  /// How many turns there are.
  __host__ __device__ int turns(int rows) const {
    return samples * heads * ((queries + rows - 1) / rows);
  }
  // [persistent]
  /// Which turn is the one of a round, where each of `blocks` blocks takes several: back and forth,
  /// so that a block which has had a longer one than others has a shorter one next.
  __host__ __device__ static int number_of_turn(int round, int block, int blocks) {
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  }
  // [persistent]
  /// The tiles of queries that see any key of a block.
  __host__ __device__ __forceinline__ Tiles tiles_seeing(int sample, int first, int rows,
                                                         int tile) const {
    const int end = first + rows < keys ? first + rows : keys;
    const bool turns = key_at.turns_in(first, end);
    Tiles tiles;
    tiles.add(seeing(sample, first, turns ? key_at.length : end), tile);
    if (turns) tiles.add(seeing(sample, key_at.length, end), tile);
    return tiles;
  }
  /// Numbers of `begins` that tiles_seeing() reads for a stretch of keys.
  int search_steps() const {
    int steps = 0;
    for (int step = 1; begins != nullptr && step <= queries; step *= 2) ++steps;
    return steps;
  }

 private:
  /// The queries that see any of these keys, which are at consecutive positions.
  __host__ __device__ Stretch seeing(int sample, int first, int end) const {
    if (!causal) return {0, queries};
    return {query_at.below(key_at[first], queries), begun_by(sample, key_at[end - 1])};
  }
  /// How many queries are of documents that begin at this position at the latest: by bisection.
  __host__ __device__ __forceinline__ int begun_by(int sample, int position) const {
    if (begins == nullptr) return queries;
    int found = 0, step = 1;
    while (step <= queries / 2) step *= 2;
    for (; step > 0; step /= 2) {
      const int next = found + step < queries ? found + step : queries;
      if (begins[int64_t{sample} * queries + next - 1] <= position) found = next;
    }
    return found;
  }
};

/// From a row of an operand to the next, from a sample to the next, and from a head to the next, in
/// elements.
struct Pitch {
  int row;
  int64_t sample;
  int head;
};

/// out = softmax(scale q k^T) v. A query that sees no key gets 0, and an lse of -inf.
template <class T>
struct Problem : Shape {
  const T* q;              ///< [samples, queries, heads, width]
  const T* k;              ///< [samples, keys, kv_heads, width]
  const T* v;              ///< [samples, keys, kv_heads, value_width()]
  T* out;                  ///< [samples, queries, heads, value_width()]
  float* lse;              ///< [samples, heads, queries]: the logarithm of the sum of exp(scores)
  float scale;             ///< positive
  float* scratch;          ///< Rung::scratch() bytes
  cuda::TensorMaps* maps;  ///< for rungs that copy boxes
  // Without gaps, unless an operand is part of a wider tensor. Outputs may have a gap behind each
  // head's, where values are padded to the keys' width: it is filled with zeros.
  Pitch of_q{heads * width, int64_t{queries} * heads* width, width};
  Pitch of_k{kv_heads * width, int64_t{keys} * kv_heads* width, width};
  Pitch of_v{kv_heads * value_width(), int64_t{keys} * kv_heads* value_width(), value_width()};
  Pitch of_out{heads * value_width(), int64_t{queries} * heads* value_width(), value_width()};
  float* wide_out = nullptr;  ///< takes out's place, in f32: to be merged, and rounded later
  int blocks = 0;             ///< of a persistent kernel; 0: one a multiprocessor
};

/// Gradients of a problem whose out and lse a forward rung has left, from that of out. They are
/// written, rounded once, or added to sums in f32, and have the same bits in each run.
template <class T>
struct Gradients {
  /// What backward keeps of a query: its lse to base 2, infinite where it sees no key, its delta,
  /// the sum over channels of dout * out, and the keys it sees. From them a score's weight and
  /// gradient follow.
  struct alignas(16) Row {
    float lse, delta;
    Stretch seen;
  };

  Problem<T> of;
  const T* dout;  ///< as out
  T* dq;          ///< as q
  T *dk, *dv;     ///< as k and v, summed over the heads that share them
  Row* rows;      ///< [samples, heads, rows_of(queries)]: scratch
  /// What is the sum over all keys, where the problem has some of them: [samples, heads, queries];
  /// nullptr: it is computed, from out. With it, `out` is not read.
  const float* delta = nullptr;
  /// Where they go in f32 instead of dq, dk and dv; all nullptr, or none.
  float *dq_sums = nullptr, *dk_sums = nullptr, *dv_sums = nullptr;
  bool adds = true;  ///< to what is in those
  Pitch of_dout = of.of_out, of_dq = of.of_q, of_dk = of.of_k, of_dv = of.of_v;

  /// Rows of a head: whole tiles of queries.
  __host__ __device__ static int rows_of(int queries) { return (queries + 127) / 128 * 128; }
};

/// What a launch asks for. Bytes of global memory are counted as sectors of 32 that a warp touches
/// and as whole boxes; at tails they are the most.
struct Cost {
  int64_t bytes;
  int64_t flops;   ///< of the two products, in whole tiles
  int64_t blocks;  ///< that can run side by side; of a persistent kernel, turns
};

/// A kernel and what it is there for. run() queues it.
template <class T, class Given = Problem<T>>
struct Rung {
  const char* name;  ///< of its file, too
  const char* idea;
  int capability;     ///< from which on it runs: 75, 80; 90 alone for those that copy boxes
  int queries, keys;  ///< of a tile of scores
  Cost (*cost)(const Shape& shape);
  void (*run)(const cuda::Queue& queue, const Given& given);
  bool keeps_scores = false;   ///< in memory
  int widest = kWidestValues;  ///< keys that it takes

  bool takes(const Shape& x) const { return x.width <= widest; }
  /// Bytes of memory besides its operands: for scores, or for outputs and lse of each part.
  int64_t scratch(const Shape& x) const {
    const int64_t rows = int64_t{4} * x.samples * x.heads * x.queries;
    if (keeps_scores) return rows * x.keys;
    return x.splits > 1 ? rows * x.splits * (x.width + 1) : 0;
  }
};

extern const Rung<float> kNaive, kFlash1, kBlockwise;
extern const Rung<bf16> kFlash2, kFlash3, kFlash4;
/// flash_2 with fewer queries a block: they take less of its memory, and keys pass by more often.
extern const Rung<bf16> kFlash2Of64, kFlash2Of32;
/// For a single query, as decoding has it: its keys may be split.
extern const Rung<bf16> kFlashDecode;
/// Parts into which the keys of a query are split, to fill a GPU of so many multiprocessors.
int splits_of(const Shape& shape, int multiprocessors);
/// They take what any of them leaves.
extern const Rung<bf16, Gradients<bf16>> kFlash2Backward, kFlash3Backward;

/// Rungs in f32, the lowest first.
std::span<const Rung<float>* const> f32_rungs();
/// Rungs in bf16, which go on from there.
std::span<const Rung<bf16>* const> bf16_rungs();
/// flash_2 with 32, 64 and 128 queries a block: what a block's memory is worth.
std::span<const Rung<bf16>* const> rungs_by_block();
/// Rungs for a single query.
std::span<const Rung<bf16>* const> decoding_rungs();
/// Rungs that go backward.
std::span<const Rung<bf16, Gradients<bf16>>* const> backward_rungs();

/// Throws UsageError where no rung whose keys have `widest` channels at most takes such a shape.
void check(const Shape& shape, int widest = kWidestValues);

/// Counts of one head, in all samples: tiles of scores that hold one that is seen, and blocks that
/// have such a tile.
struct Count {
  int64_t tiles, blocks;
};
/// Where a block has `queries` queries. `begins` has to be in the host's memory.
Count count_tiles(const Shape& shape, int queries, int keys);
/// Where a block has `keys` keys, and tiles of queries pass by.
Count count_tiles_of_keys(const Shape& shape, int keys, int queries);
/// Stretches that blocks of `rows` rows look up, of one head in all samples: one for each range of
/// positions that a block meets.
int64_t stretches_of(const Shape& shape, const Ranges& at, int count, int rows);

}  // namespace usp::attention
