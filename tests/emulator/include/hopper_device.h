#pragma once

#include <cstdint>

#include "cuda.h"

/// What the wrappers of hopper.h do on the emulated device.
namespace usp::emulator {

uint32_t shared_address(const void* p);

void barrier_init(void* barrier, unsigned arrivals);
void barrier_arrive(void* barrier, unsigned bytes);
bool barrier_wait(void* barrier, unsigned parity, bool until_over);
void fence_barrier_init();
void fence_proxy_async();
void named_barrier(int number, int threads, bool wait);

void tma_load(void* to, const CUtensorMap* map, void* barrier, int x, int y, int z);
void tma_store(const CUtensorMap* map, const void* from, int x, int y);
void tma_store_commit();
void tma_store_wait_read(int pending);

void cp_async(void* to, const void* from, int bytes);
void cp_async_commit();
void cp_async_wait(int pending);

void ldmatrix(uint32_t* d, const void* row, bool transposed);
void stmatrix(void* row, const uint32_t* d);
void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b);

void wgmma_fence();
void wgmma(float* d, int registers, const uint32_t* a_registers, uint64_t a, uint64_t b, bool add,
           bool a_mn, bool b_mn);
void wgmma_commit();
void wgmma_wait(int pending);
void wgmma_done(const float* d);
void set_registers(int registers, bool more);

float fast_exp2(float x);

}  // namespace usp::emulator
