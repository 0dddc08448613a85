#pragma once

#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "ladder.h"

/// What the files with kernels share.
namespace usp::attention {

using cuda::ceil_div;

/// Where head number `index` of all samples begins in each operand, and how far apart rows are.
template <class T>
struct Head {
  int sample, kv;
  const T *q, *k, *v;
  T* out;
  float *lse, *scores;
  int pitch, kv_pitch;

  __device__ Head(const Problem<T>& p, int index)
      : sample(index / p.heads),
        kv(index % p.heads / (p.heads / p.kv_heads)),
        lse(p.lse + int64_t{index} * p.queries),
        scores(p.scores + int64_t{index} * p.queries * p.keys),
        pitch(p.heads * p.width),
        kv_pitch(p.kv_heads * p.width) {
    const int64_t at = int64_t{sample} * p.queries * pitch + index % p.heads * p.width;
    const int64_t kv_at = int64_t{sample} * p.keys * kv_pitch + kv * p.width;
    q = p.q + at;
    out = p.out + at;
    k = p.k + kv_at;
    v = p.v + kv_at;
  }
};

/// Bytes that an access to memory moves at least.
inline constexpr int kSector = 32;

/// Bytes of `reads` reads of where documents begin, each of neighbors, by a warp; 0 without them.
inline int64_t bytes_of_begins(const Shape& x, int64_t reads) {
  return x.begins == nullptr ? 0 : reads * kSector;
}

/// run(width) with the width of a head as a constant.
template <class Run>
void with_width(int width, const Run& run) {
  if (width == 64) return run(std::integral_constant<int, 64>{});
  run(std::integral_constant<int, 128>{});
}

}  // namespace usp::attention
