#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

/// The element types of tensors as a GPU knows them, and how a thread reads and writes them.
namespace usp::cuda {

/// The same 16 bits as usp::bf16, with the GPU's conversions.
using bf16 = __nv_bfloat16;

/// The type in which elements of T are computed with and summed: double for double, else float.
template <class T>
using accumulate_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class A>
inline constexpr A kInfinity = std::numeric_limits<A>::infinity();

__device__ inline float load(float x) { return x; }
__device__ inline double load(double x) { return x; }
__device__ inline float load(bf16 x) { return __bfloat162float(x); }

__device__ inline void store(float& y, float value) { y = value; }
__device__ inline void store(float& y, double value) { y = static_cast<float>(value); }
__device__ inline void store(double& y, double value) { y = value; }
/// Rounds to nearest even, once.
__device__ inline void store(bf16& y, float value) { y = __float2bfloat16(value); }
__device__ inline void store(bf16& y, double value) { y = __double2bfloat16(value); }

/// As many elements of T as one access of a thread can move: 16 bytes.
template <class T>
inline constexpr int kWide = 16 / sizeof(T);

/// W elements side by side, moved together.
template <class T, int W>
struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Pack {
  T x[W];
};

/// W numbers to compute with, in registers.
template <class A, int W>
struct Numbers {
  A x[W];
  __device__ A& operator[](int i) { return x[i]; }
  __device__ A operator[](int i) const { return x[i]; }
};

/// The W elements from `from` on, which has to be aligned to as many.
template <int W, class T>
__device__ Numbers<accumulate_t<T>, W> load_pack(const T* from) {
  const Pack<T, W> pack = *reinterpret_cast<const Pack<T, W>*>(from);
  Numbers<accumulate_t<T>, W> numbers;
  for (int w = 0; w < W; ++w) numbers[w] = load(pack.x[w]);
  return numbers;
}

/// Rounds and writes W numbers from `to` on, which has to be aligned to as many.
template <int W, class T, class A>
__device__ void store_pack(T* to, const Numbers<A, W>& numbers) {
  Pack<T, W> pack;
  for (int w = 0; w < W; ++w) store(pack.x[w], numbers[w]);
  *reinterpret_cast<Pack<T, W>*>(to) = pack;
}

/// Says that rows of `length` elements were too uneven for accesses of 16 bytes:
/// CudaDevice::remarks() names them.
void note_narrow_rows(int64_t length);

/// Calls run(W) with the widest W that suits rows of `length` elements at these addresses:
/// kWide<T>, T being the largest of their types, or 1 where rows would not begin on a multiple of
/// 16 bytes. Kernels are written for both; a warp's access is coalesced either way, and the wide
/// one takes fewer instructions.
template <class T, class Run>
void with_width(int64_t length, std::initializer_list<const void*> addresses, const Run& run) {
  bool wide = length % kWide<T> == 0;
  for (const void* address : addresses) wide &= reinterpret_cast<uintptr_t>(address) % 16 == 0;
  if (!wide) note_narrow_rows(length);
  wide ? run(std::integral_constant<int, kWide<T>>{}) : run(std::integral_constant<int, 1>{});
}

}  // namespace usp::cuda
