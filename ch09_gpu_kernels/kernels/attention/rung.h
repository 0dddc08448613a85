#pragma once

#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "ladder.h"

/// What the files with kernels share.
namespace usp::attention {

using cuda::ceil_div;

/// Where a head of a sample begins in an operand.
template <class T>
__device__ T* head_of(T* x, const Pitch& pitch, int sample, int head) {
  return x + sample * pitch.sample + head * pitch.head;
}

/// Where head number `index` of all samples begins in each operand, and how far apart rows are.
template <class T>
struct Head {
  int sample, number, kv;  ///< number: in its sample
  const T *q, *k, *v;
  T* out;
  float *wide_out, *lse, *scores;
  int pitch, k_pitch, v_pitch, out_pitch;

  __device__ Head(const Problem<T>& p, int index)
      : sample(index / p.heads),
        number(index % p.heads),
        kv(number / (p.heads / p.kv_heads)),
        q(head_of(p.q, p.of_q, sample, number)),
        k(head_of(p.k, p.of_k, sample, kv)),
        v(head_of(p.v, p.of_v, sample, kv)),
        out(head_of(p.out, p.of_out, sample, number)),
        wide_out(p.wide_out == nullptr ? nullptr : head_of(p.wide_out, p.of_out, sample, number)),
        lse(p.lse + int64_t{index} * p.queries),
        scores(p.scratch + int64_t{index} * p.queries * p.keys),
        pitch(p.of_q.row),
        k_pitch(p.of_k.row),
        v_pitch(p.of_v.row),
        out_pitch(p.of_out.row) {}
};

/// Bytes that an access to memory moves at least.
inline constexpr int kSector = 32;

/// Bytes of `reads` reads of where documents begin, each of neighbors, by a warp; 0 without them.
inline int64_t bytes_of_begins(const Shape& x, int64_t reads) {
  return x.begins == nullptr ? 0 : reads * kSector;
}

/// Whether the generation that is compiled for has so much shared memory for a block: the kernels
/// of latent attention's heads are empty where no GPU could run them.
__device__ constexpr bool has_shared([[maybe_unused]] int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return bytes <= 99 << 10;
#else
  return true;
#endif
}

/// run(width) with the width of a head as a constant.
template <class Run>
void with_width(int width, const Run& run) {
  if (width == 64) return run(std::integral_constant<int, 64>{});
  run(std::integral_constant<int, 128>{});
}
/// run(width, width of values), also with values narrower than keys.
template <class Run>
void with_widths(int width, const Run& run) {
  if (width == kWidestKeys) {
    return run(std::integral_constant<int, kWidestKeys>{},
               std::integral_constant<int, kWidestValues>{});
  }
  with_width(width, [&](auto same) { run(same, same); });
}

}  // namespace usp::attention
