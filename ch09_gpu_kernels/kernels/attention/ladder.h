#pragma once

#include <span>

#include "cuda/tensor_maps.h"

namespace usp::cuda {
struct Queue;
}

/// Attention, from scores in memory to two warpgroups that take turns: each rung is a file with one
/// idea more. One goes backward.
namespace usp::attention {

using bf16 = __nv_bfloat16;  ///< CUDA's type

/// How much there is, and who sees whom.
struct Shape {
  int samples, queries, keys;
  int heads, kv_heads;  ///< heads / kv_heads heads of queries share keys and values
  int width;            ///< channels of a head: 64 or 128
  bool causal = false;
  int offset = 0;  ///< causal: query i sees keys 0 to i + offset, so some may see none

  /// How many keys this query sees; they are the first ones.
  __host__ __device__ int seen_by(int query) const {
    const int last = causal ? query + offset : keys - 1;
    return last < 0 ? 0 : last < keys ? last + 1 : keys;
  }
  /// The first query that sees this key; all those behind it do, too. `queries` or more: none.
  __host__ __device__ int first_to_see(int key) const {
    return causal && key > offset ? key - offset : 0;
  }
};

/// out = softmax(scale q k^T) v. A query that sees no key gets 0, and an lse of -inf.
template <class T>
struct Problem : Shape {
  const T* q;              ///< [samples, queries, heads, width]
  const T *k, *v;          ///< [samples, keys, kv_heads, width]
  T* out;                  ///< as q
  float* lse;              ///< [samples, heads, queries]: the logarithm of the sum of exp(scores)
  float scale;             ///< positive
  float* scores;           ///< scratch() bytes
  cuda::TensorMaps* maps;  ///< for rungs that copy boxes
};

/// Gradients of a problem whose out and lse a forward rung has left, from that of out. They are
/// written, rounded once, and have the same bits in each run.
template <class T>
struct Gradients {
  /// What backward keeps of a query: its lse to base 2, infinite where it sees no key, and its
  /// delta, the sum over channels of dout * out. From them a score's weight and gradient follow.
  struct alignas(8) Row {
    float lse, delta;
  };

  Problem<T> of;
  const T* dout;  ///< as q
  T* dq;          ///< as q
  T *dk, *dv;     ///< as k, summed over the heads that share it
  Row* rows;      ///< [samples, heads, rows_of(queries)]: scratch

  /// Rows of a head: whole tiles of queries.
  __host__ __device__ static int rows_of(int queries) { return (queries + 127) / 128 * 128; }
};

/// What a launch asks for. Bytes of global memory are counted as sectors of 32 that a warp touches
/// and as whole boxes; at tails they are the most.
struct Cost {
  int64_t bytes;
  int64_t flops;   ///< of the two products, in whole tiles
  int64_t blocks;  ///< that can run side by side
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
  bool keeps_scores = false;  ///< in memory

  /// Bytes of memory besides its operands.
  int64_t scratch(const Shape& x) const {
    return keeps_scores ? int64_t{4} * x.samples * x.heads * x.queries * x.keys : 0;
  }
};

extern const Rung<float> kNaive, kFlash1, kBlockwise;
extern const Rung<bf16> kFlash2, kFlash3, kFlash4;
/// Backward of kFlash2, which takes what any of them leaves.
extern const Rung<bf16, Gradients<bf16>> kFlash2Backward;

/// Those in f32, the lowest first.
std::span<const Rung<float>* const> f32_rungs();
/// Those in bf16, which go on from there.
std::span<const Rung<bf16>* const> bf16_rungs();
/// Those that go backward.
std::span<const Rung<bf16, Gradients<bf16>>* const> backward_rungs();

/// Throws UsageError where no rung takes such a shape.
void check(const Shape& shape);

/// Tiles of scores of a head that hold one that is seen, where a block has so many queries.
int64_t tiles_of(const Shape& shape, int queries, int keys);
/// The same where a block has so many keys, and tiles of queries pass by.
int64_t tiles_of_keys(const Shape& shape, int keys, int queries);

}  // namespace usp::attention
