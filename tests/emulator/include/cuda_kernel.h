#pragma once

#include <math.h>

#include <bit>
#include <cstdint>
#include <type_traits>

/// The vocabulary of CUDA kernels as plain C++20: qualifiers, vectors, indices, barriers, shuffles.
/// Names and meanings are those of the CUDA C++ Programming Guide.

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __shared__ constinit thread_local  // recognised by its address, in the TLS segment
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct dim3 {
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned x, y, z;
};
struct uint3 {
  unsigned x, y, z;
};

#define USP_VECTOR2(type, name, bytes) \
  struct alignas(bytes) name {         \
    type x, y;                         \
  };                                   \
  constexpr name make_##name(type x, type y) { return {x, y}; }
#define USP_VECTOR4(type, name, bytes) \
  struct alignas(bytes) name {         \
    type x, y, z, w;                   \
  };                                   \
  constexpr name make_##name(type x, type y, type z, type w) { return {x, y, z, w}; }
USP_VECTOR2(int, int2, 8)
USP_VECTOR2(unsigned, uint2, 8)
USP_VECTOR2(float, float2, 8)
USP_VECTOR2(double, double2, 16)
USP_VECTOR2(long long, longlong2, 16)
USP_VECTOR4(unsigned short, ushort4, 8)
USP_VECTOR4(int, int4, 16)
USP_VECTOR4(unsigned, uint4, 16)
USP_VECTOR4(float, float4, 16)
#undef USP_VECTOR2
#undef USP_VECTOR4

/// Built-ins of the thread that runs now. One kernel runs at a time, so these are plain variables.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffff);

// Blocks run one after another and threads take turns, so memory is always in order.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace usp::emulator {

/// The dynamic shared memory of the block, as many bytes as the launch asked for; aligned to 1024.
void* dynamic_shared_memory();

/// Index of the running thread in its warp.
int lane();
/// What lane `source` gave to the same call; returns once all lanes in `mask` have come.
uint64_t shuffle_bits(unsigned mask, uint64_t mine, int source);
/// One bit for each lane in `mask` whose `predicate` holds.
unsigned ballot(unsigned mask, bool predicate);

template <class T>
__forceinline__ T shuffle(unsigned mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle_bits(mask, bits, source);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace usp::emulator

// A source outside the group of `width` lanes means the lane's own value.
template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = usp::emulator::lane() & ~(width - 1);
  return usp::emulator::shuffle(mask, value, first + (source & (width - 1)));
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const int lane = usp::emulator::lane(), source = lane ^ lanes;
  const int end = (lane & ~(width - 1)) + width;
  return usp::emulator::shuffle(mask, value, source < end ? source : lane);
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = usp::emulator::lane(), source = lane + static_cast<int>(delta);
  const int end = (lane & ~(width - 1)) + width;
  return usp::emulator::shuffle(mask, value, source < end ? source : lane);
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = usp::emulator::lane(), source = lane - static_cast<int>(delta);
  const int first = lane & ~(width - 1);
  return usp::emulator::shuffle(mask, value, source >= first ? source : lane);
}
__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
  return usp::emulator::ballot(mask, predicate != 0);
}
__forceinline__ int __any_sync(unsigned mask, int predicate) {
  return usp::emulator::ballot(mask, predicate != 0) != 0;
}
__forceinline__ int __all_sync(unsigned mask, int predicate) {
  return usp::emulator::ballot(mask, predicate != 0) == mask;
}

// Return the old value.
int atomicAdd(int* address, int value);
unsigned atomicAdd(unsigned* address, unsigned value);
unsigned long long atomicAdd(unsigned long long* address, unsigned long long value);
float atomicAdd(float* address, float value);
double atomicAdd(double* address, double value);
int atomicMax(int* address, int value);
int atomicExch(int* address, int value);
int atomicCAS(int* address, int compare, int value);

template <class T>
__forceinline__ T __ldg(const T* address) {
  return *address;
}

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }

#define USP_MIN_MAX(type)                                      \
  constexpr type min(type a, type b) { return b < a ? b : a; } \
  constexpr type max(type a, type b) { return a < b ? b : a; }
USP_MIN_MAX(int)
USP_MIN_MAX(unsigned)
USP_MIN_MAX(long)
USP_MIN_MAX(unsigned long)
USP_MIN_MAX(long long)
USP_MIN_MAX(unsigned long long)
#undef USP_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
