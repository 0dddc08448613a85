#include "kernels.h"

/// The first kernels that one writes for a card: an addition, a copy, and arithmetic without end.
namespace usp::ideas {

namespace {

// [vector_add]
__global__ void add(int64_t n, const float* x, const float* z, float* y) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + z[i];
}

void run_add(const cuda::Queue& queue, const Data& d) {
  const int64_t n = d.shape.n();
  launch(add, ceil_div(n, 256), 256, 0, queue, n, d.x, d.z, d.y);
}
// [vector_add]

// [copy]
/// As many blocks as a card holds at once, each of which goes on where the last of them ended.
__global__ void copy(int64_t n, const float* x, float* y) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = cuda::thread_of_grid(); i < n / 4; i += threads) {
    reinterpret_cast<float4*>(y)[i] = reinterpret_cast<const float4*>(x)[i];
  }
  for (int64_t i = n / 4 * 4 + cuda::thread_of_grid(); i < n; i += threads) y[i] = x[i];
}
// [copy]

void run_copy(const cuda::Queue& queue, const Data& d) {
  constexpr int64_t kMost = 132 * 8;  // of an H100's multiprocessors, eight each
  const int64_t n = d.shape.n();
  launch(copy, min(blocks_for(ceil_div(n, 4)), kMost), kThreads, 0, queue, n, d.x, d.y);
}

constexpr int kSteps = 256, kChains = 4;

// [fma_chain]
/// Four chains a thread: while one addition is under way, the next three begin.
__global__ void fma_chain(int64_t n, const float* x, float* y) {
  const int64_t first = int64_t{blockIdx.x} * kChains * blockDim.x + threadIdx.x;
  float values[kChains];
  for (int j = 0; j < kChains; ++j) {
    const int64_t i = first + j * blockDim.x;
    values[j] = i < n ? x[i] : 0;
  }
  for (int step = 0; step < kSteps; ++step) {
    for (float& value : values) value = fmaf(value, 0.999F, 0.001F);
  }
  for (int j = 0; j < kChains; ++j) {
    const int64_t i = first + j * blockDim.x;
    if (i < n) y[i] = values[j];
  }
}
// [fma_chain]

void run_chain(const cuda::Queue& queue, const Data& d) {
  const int64_t n = d.shape.n();
  launch(fma_chain, blocks_for(ceil_div(n, kChains)), kThreads, 0, queue, n, d.x, d.y);
}

const Rung kRungs[] = {
    {"vector_add", "a thread an element", 75,
     [](Shape s) -> Counts { return {.bytes = 3 * bytes_of(s.n()), .flops = s.n()}; }, run_add},
    {"copy", "16 bytes in one access, few blocks", 75,
     [](Shape s) -> Counts { return {.bytes = 2 * bytes_by_four(s.n())}; }, run_copy},
    {"fma_chain", "512 operations an element", 75,
     [](Shape s) -> Counts { return {.bytes = 2 * bytes_of(s.n()), .flops = 2 * kSteps * s.n()}; },
     run_chain},
};

}  // namespace

const Ideas kPrimer{"primer", kRungs};

}  // namespace usp::ideas
