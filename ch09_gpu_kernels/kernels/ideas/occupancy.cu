#include "cuda/hopper.h"
#include "kernels.h"
#include "occupancy.h"

/// Copies that differ in what a block takes of its multiprocessor, and so in how many blocks are
/// there at once. What hides the memory's latency is the bytes on their way: of all threads
/// together.
namespace usp::ideas {

namespace {

// [copy_by]
/// Each thread reads `each` numbers before it writes one.
template <int threads, int each>
__global__ void __launch_bounds__(threads) copy_by(int64_t n, const float* x, float* y) {
  const int64_t first = int64_t{blockIdx.x} * threads * each + threadIdx.x;
  float values[each];
  USP_UNROLL
  for (int i = 0; i < each; ++i) {
    values[i] = first + i * threads < n ? x[first + i * threads] : 0;
  }
  USP_UNROLL
  for (int i = 0; i < each; ++i) {
    if (first + i * threads < n) y[first + i * threads] = values[i];
  }
}
// [copy_by]

/// Registers: no fewer than nvcc gives a thread, which rungs.txt lists.
template <int threads, int each>
Counts predict(Shape s, int64_t registers, int64_t shared_bytes) {
  const int64_t held = blocks_held({threads, registers, shared_bytes});
  return {.bytes = 2 * bytes_of(s.n()),
          .blocks_held = held,
          .warps_held = held * threads / kWarp,
          .bytes_in_flight = held * threads * each * int64_t{sizeof(float)}};
}

template <int threads, int each>
void run(const cuda::Queue& queue, const Data& d, int64_t shared_bytes) {
  const int64_t n = d.shape.n();
  launch(copy_by<threads, each>, ceil_div(n, threads * each), threads, shared_bytes, queue, n, d.x,
         d.y);
}

constexpr int64_t kMuchShared = 96 << 10;

const Rung kRungs[] = {
    {"one_each", "a number a thread", 75, [](Shape s) { return predict<256, 1>(s, 32, 0); },
     [](const cuda::Queue& queue, const Data& d) { run<256, 1>(queue, d, 0); }},
    {"much_shared", "as before, with 96 KiB of shared memory a block", 80,
     [](Shape s) { return predict<256, 1>(s, 32, kMuchShared); },
     [](const cuda::Queue& queue, const Data& d) { run<256, 1>(queue, d, kMuchShared); }},
    {"large_block", "8 numbers a thread, blocks of 768", 75,
     [](Shape s) { return predict<768, 8>(s, 32, 0); },
     [](const cuda::Queue& queue, const Data& d) { run<768, 8>(queue, d, 0); }},
    {"many_each", "64 numbers a thread", 75, [](Shape s) { return predict<256, 64>(s, 128, 0); },
     [](const cuda::Queue& queue, const Data& d) { run<256, 64>(queue, d, 0); }},
};

}  // namespace

const Ideas kOccupancy{"occupancy", kRungs};

}  // namespace usp::ideas
