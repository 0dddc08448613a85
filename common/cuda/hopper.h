#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#ifndef __CUDACC__
#include <hopper_device.h>  // of the emulator: what each wrapper does there
#endif

/// What a GPU does beside and between its threads: copies into shared memory, barriers there,
/// products of tiles. Each wrapper is one instruction, and this the only file with PTX. Two
/// compilers read it, as they do launch.h, and here alone they read different lines. Rules are
/// those of the PTX ISA, whose sections are named.
///
/// From compute capability 8.0 on: cp_async, ldmatrix, mma, named barriers. From 9.0 on: Barrier,
/// stmatrix. For sm_90a alone: tma_*, wgmma_*, fewer_registers, more_registers.
namespace usp::cuda {

// The instruction on a GPU, or the emulator's function.
#ifdef __CUDACC__
#define USP_PTX(gpu, cpu) gpu
#define USP_UNROLL _Pragma("unroll")
#else
#define USP_PTX(gpu, cpu) cpu
#define USP_UNROLL
#endif
#define USP_WRAP __device__ __forceinline__

/// Where instructions find shared memory that a pointer names.
USP_WRAP uint32_t shared_address(const void* p) {
  return USP_PTX(static_cast<uint32_t>(__cvta_generic_to_shared(p)), emulator::shared_address(p));
}

/// The dynamic shared memory of the block, 16-byte aligned. Its size is launch()'s shared_bytes.
template <class T>
USP_WRAP T* dynamic_shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(16) unsigned char shared_memory[];
  return reinterpret_cast<T*>(shared_memory);
#else
  return static_cast<T*>(emulator::dynamic_shared_memory());
#endif
}
/// The same at a multiple of 1024 bytes: where every swizzle begins anew.
USP_WRAP char* swizzled_shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(1024) char usp_swizzled[];
  return usp_swizzled;
#else
  return static_cast<char*>(emulator::dynamic_shared_memory());
#endif
}

// ---- mbarrier

/// In shared memory. Counts arrivals of threads and bytes of copies; a phase is over when none of
/// either is missing, and the next one begins. What threads did before they arrived, and what
/// copies brought, is there for whoever has waited for the phase (9.7.13.15).
struct alignas(8) Barrier {
  uint64_t word;

  /// By one thread, then fence_barrier_init() and __syncthreads(): `arrivals` end each phase.
  USP_WRAP void init(unsigned arrivals) {
    USP_PTX(asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                         "r"(arrivals)
                         : "memory"),
            emulator::barrier_init(this, arrivals));
  }
  /// One arrival of this phase.
  USP_WRAP void arrive() {
    USP_PTX(asm volatile(
                "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(this))
                : "memory"),
            emulator::barrier_arrive(this, 0));
  }
  /// Arrives, and the phase waits for `bytes` bytes as well: those of whole boxes, also at a
  /// tensor's end.
  USP_WRAP void arrive_expect(unsigned bytes) {
    USP_PTX(asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                             shared_address(this)),
                         "r"(bytes)
                         : "memory"),
            emulator::barrier_arrive(this, bytes));
  }
  /// Is the phase over that has this parity? It has to be the current one or the one before. The
  /// phase before the first has parity 1, and is over.
  USP_WRAP bool try_wait(unsigned parity) {
#ifdef __CUDACC__
    uint32_t over;
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(over)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return over != 0;
#else
    return emulator::barrier_wait(this, parity, false);
#endif
  }
  USP_WRAP void wait(unsigned parity) {
    USP_PTX(while (!try_wait(parity)){}, emulator::barrier_wait(this, parity, true));
  }
};

/// Barriers that were initialised are so for copies, too.
USP_WRAP void fence_barrier_init() {
  USP_PTX(asm volatile("fence.mbarrier_init.release.cluster;" ::
                           : "memory"),
          emulator::fence_barrier_init());
}
/// What this thread wrote to shared memory is there for copies and products of tiles, and what it
/// read may be overwritten by them: before a barrier with the thread that starts them (9.7.9.25).
/// ladder_bench_unfenced does without: the emulator leaves out any call, a card none at run time.
USP_WRAP void fence_proxy_async() {
#ifndef USP_WITHOUT_PROXY_FENCE
  USP_PTX(asm volatile("fence.proxy.async.shared::cta;" ::
                           : "memory"),
          emulator::fence_proxy_async());
#endif
}
/// A barrier of `threads` threads, whole warps, which name the same number of 1 to 15.
USP_WRAP void named_barrier(int number, int threads) {
  USP_PTX(asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads)
                       : "memory"),
          emulator::named_barrier(number, threads, true));
}
/// Arrives at that barrier and goes on.
USP_WRAP void named_arrive(int number, int threads) {
  USP_PTX(asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads)
                       : "memory"),
          emulator::named_barrier(number, threads, false));
}

// ---- copies of boxes of a tensor (9.7.9.27)

/// Brings the box at column x of row y of the tensor to shared memory, at a multiple of 128 bytes;
/// a swizzled one at a multiple of its pattern. What lies outside the tensor is zeros. One thread
/// calls.
USP_WRAP void tma_load_2d(void* to, const CUtensorMap* map, Barrier* barrier, int x, int y) {
  USP_PTX(asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::"
                       "bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
                       "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
                       : "memory"),
          emulator::tma_load(to, map, barrier, x, y, 0));
}
/// The same in plane z.
USP_WRAP void tma_load_3d(void* to, const CUtensorMap* map, Barrier* barrier, int x, int y, int z) {
  USP_PTX(asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::"
                       "bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                       "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                       : "memory"),
          emulator::tma_load(to, map, barrier, x, y, z));
}
/// Writes the box back, but for what lies outside the tensor.
USP_WRAP void tma_store_2d(const CUtensorMap* map, const void* from, int x, int y) {
  USP_PTX(asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], "
                       "[%1];" ::"l"(map),
                       "r"(shared_address(from)), "r"(x), "r"(y)
                       : "memory"),
          emulator::tma_store(map, from, x, y));
}
/// The stores of this thread since the last commit are a group.
USP_WRAP void tma_store_commit() {
  USP_PTX(asm volatile("cp.async.bulk.commit_group;" ::: "memory"), emulator::tma_store_commit());
}
/// All but the last `pending` groups of this thread have read shared memory, which may change now.
template <int pending>
USP_WRAP void tma_store_wait_read() {
  USP_PTX(asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending)
                       : "memory"),
          emulator::tma_store_wait_read(pending));
}

// ---- cp.async (9.7.9.25)

/// 16 bytes from global memory, past the registers and the L1 cache; addresses are multiples of 16.
/// Of fewer `bytes` the rest is zeros.
USP_WRAP void cp_async_16(void* to, const void* from, int bytes = 16) {
  USP_PTX(asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                       "l"(from), "r"(bytes)
                       : "memory"),
          emulator::cp_async(to, from, bytes));
}
/// The copies of this thread since the last commit are a group.
USP_WRAP void cp_async_commit() {
  USP_PTX(asm volatile("cp.async.commit_group;" ::: "memory"), emulator::cp_async_commit());
}
/// All but the last `pending` groups of this thread are there, for this thread; for others after a
/// barrier.
template <int pending>
USP_WRAP void cp_async_wait() {
  USP_PTX(asm volatile("cp.async.wait_group %0;" ::"n"(pending)
                       : "memory"),
          emulator::cp_async_wait(pending));
}

// ---- products of a warp (9.7.14)

/// Four 8x8 matrices of 16 bits: lane i names row i%8 of matrix i/8, 16 bytes; register j then
/// holds row lane/4, columns lane%4*2 and the next, of matrix j.
USP_WRAP void ldmatrix_x4(uint32_t (&d)[4], const void* row) {
  USP_PTX(asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                       : "r"(shared_address(row))
                       : "memory"),
          emulator::ldmatrix(d, row, false));
}
/// The same of the transposed matrices.
USP_WRAP void ldmatrix_x4_trans(uint32_t (&d)[4], const void* row) {
  USP_PTX(asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                       : "r"(shared_address(row))
                       : "memory"),
          emulator::ldmatrix(d, row, true));
}
/// The way back.
USP_WRAP void stmatrix_x4(void* row, const uint32_t (&d)[4]) {
  USP_PTX(asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                           shared_address(row)),
                       "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
                       : "memory"),
          emulator::stmatrix(row, d));
}
/// d += a b, 16 x 8 x 16, bf16 to f32. With g = lane/4, q = lane%4: d[i] is (g + i/2*8, 2q + i%2);
/// the halves h of a[j] are (g + j%2*8, 2q + h + j/2*8); those of b[j] are k = 2q + h + 8j of
/// column g.
USP_WRAP void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  USP_PTX(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, "
                       "%5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                       : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                       : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])),
          emulator::mma_m16n8k16(d, a, b));
}

// ---- products of a warpgroup (9.7.15)

/// As a descriptor counts them; a tensor map counts in the other direction.
enum class Swizzle : uint64_t { none = 0, bytes128 = 1, bytes64 = 2, bytes32 = 3 };

/// A tile of shared memory as wgmma reads it, offsets in bytes. K contiguous and swizzled: `stride`
/// is from 8 rows to the next, `leading` is not used. M or n contiguous and swizzled: `leading` is
/// from one swizzled row of them to the next, `stride` from 8 k to the next.
USP_WRAP uint64_t descriptor(const void* tile, Swizzle swizzle, unsigned leading, unsigned stride) {
  const auto field = [](uint64_t bytes) { return (bytes & 0x3ffff) >> 4; };
  return field(shared_address(tile)) | field(leading) << 16 | field(stride) << 32 |
         static_cast<uint64_t>(swizzle) << 62;
}

#ifdef __CUDACC__
/// Keeps the compiler from moving what it does with these registers across this place.
template <int n>
USP_WRAP void pin(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int n>
USP_WRAP void pin(uint32_t (&a)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
#endif

/// Before the first product, and after threads have touched registers that it uses: name those.
template <class... Registers>
USP_WRAP void wgmma_fence(Registers&... d) {
#ifdef __CUDACC__
  (pin(d), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  (static_cast<void>(d), ...);
  emulator::wgmma_fence();
#endif
}
/// The products since the last commit are a group.
USP_WRAP void wgmma_commit() {
  USP_PTX(asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"), emulator::wgmma_commit());
}
/// All but the last `pending` groups are over, and `d` holds their results.
template <int pending, int... n>
USP_WRAP void wgmma_wait(float (&... d)[n]) {
#ifdef __CUDACC__
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  (pin(d), ...);
#else
  emulator::wgmma_wait(pending);
  (emulator::wgmma_done(d), ...);
#endif
}

#ifdef __CUDACC__
#define USP_TEN(t)                                                                       \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t \
  "8, "                                                                                  \
  "%" #t "9, "
#define USP_D32 "{" USP_TEN() USP_TEN(1) USP_TEN(2) "%30, %31}"
#define USP_D64 \
  "{" USP_TEN() USP_TEN(1) USP_TEN(2) USP_TEN(3) USP_TEN(4) USP_TEN(5) "%60, %61, %62, %63}"
#define USP_D128                                                                             \
  "{" USP_TEN() USP_TEN(1) USP_TEN(2) USP_TEN(3) USP_TEN(4) USP_TEN(5) USP_TEN(6) USP_TEN(7) \
      USP_TEN(8) USP_TEN(9) USP_TEN(10)                                                      \
          USP_TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127}"
#define USP_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define USP_F16(i) USP_F4(i), USP_F4(i + 4), USP_F4(i + 8), USP_F4(i + 12)
#define USP_F32 USP_F16(0), USP_F16(16)
#define USP_F64 USP_F32, USP_F16(32), USP_F16(48)
#define USP_F128 USP_F64, USP_F16(64), USP_F16(80), USP_F16(96), USP_F16(112)

// One row for each number of accumulators: n, the type of a and b, and the numbers of the operands
// that follow the accumulators.
#define USP_WGMMA_TABLE(row)                                                \
  row(32, 64, "bf16", "%32", "%33", "%34", "%35", "%36", "%37", "%38")      \
      row(64, 128, "bf16", "%64", "%65", "%66", "%67", "%68", "%69", "%70") \
          row(128, 256, "bf16", "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#define USP_WGMMA_TILES(r, n, type, o0, o1, o2, o3, o4, o5, o6)                         \
  if constexpr (registers == r) {                                                       \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " o2                               \
                 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
                 " " USP_D##r ", " o0 ", " o1 ", p, 1, 1, " o3 ", " o4 ";\n}"           \
                 : USP_F##r                                                             \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(a_mn), "n"(b_mn));   \
  }
#define USP_WGMMA_REGISTERS(r, n, type, o0, o1, o2, o3, o4, o5, o6)                                \
  if constexpr (registers == r) {                                                                  \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, " o5                                          \
                 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type            \
                 " " USP_D##r ", {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", p, 1, 1, " o6 ";\n}"    \
                 : USP_F##r                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), \
                   "n"(b_mn));                                                                     \
  }
#endif

/// d = a b + d or, without `add`, a b: 64 x 2 registers x 16, bf16 to f32, a and b by descriptors.
/// `a_mn`, `b_mn`: the tile has m or n contiguous rather than k. With g = lane/4, q = lane%4 and w
/// the warp of the warpgroup: d[i] is (16w + g + i/2%2*8, 8(i/4) + 2q + i%2).
template <int a_mn = 0, int b_mn = 0, int registers>
USP_WRAP void wgmma(float (&d)[registers], uint64_t a, uint64_t b, bool add) {
  static_assert(registers == 32 || registers == 64 || registers == 128);
#ifdef __CUDACC__
  USP_WGMMA_TABLE(USP_WGMMA_TILES)
#else
  emulator::wgmma(d, registers, nullptr, a, b, add, a_mn, b_mn);
#endif
}
/// The same with a of registers, as of mma_m16n8k16 for each warp.
template <int b_mn = 0, int registers>
USP_WRAP void wgmma(float (&d)[registers], const uint32_t (&a)[4], uint64_t b, bool add) {
  static_assert(registers == 32 || registers == 64 || registers == 128);
#ifdef __CUDACC__
  USP_WGMMA_TABLE(USP_WGMMA_REGISTERS)
#else
  emulator::wgmma(d, registers, a, 0, b, add, 0, b_mn);
#endif
}

/// Registers of each thread from here on, a multiple of 8 from 24 to 256: all warps of a warpgroup
/// give some back, or wait until others have (9.7.19.5).
template <int registers>
USP_WRAP void fewer_registers() {
  USP_PTX(asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers)),
          emulator::set_registers(registers, false));
}
template <int registers>
USP_WRAP void more_registers() {
  USP_PTX(asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers)),
          emulator::set_registers(registers, true));
}

/// Row and column of d[0] of a thread of the warpgroup.
USP_WRAP int wgmma_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
USP_WRAP int wgmma_column(int thread) { return thread % 4 * 2; }

/// Two bf16 as products take them: the low half is the first.
USP_WRAP uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  std::memcpy(&word, &pair, sizeof(word));
  return word;
}

/// 2^x, to two units in the last place; 0 where the result would be below f32's normal numbers.
USP_WRAP float fast_exp2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emulator::fast_exp2(x);
#endif
}

}  // namespace usp::cuda
