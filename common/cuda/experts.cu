#include "cuda/kernels.h"
#include "cuda/reduce.h"

/// The rows of tokens on their way to experts and back. Nothing here uses atomics: an expert has a
/// warp that looks for its choices, 32 at a time, and so meets them in the order of the tokens.
namespace usp::cuda {

namespace {

/// Reads `count` choices, a lane each, and calls body(index, choice, whether it is this lane's to
/// take, how many lanes below have one to take, how many all lanes have). Beyond the end: -1.
template <class Wanted, class Body>
__device__ void for_each_choice(const int32_t* choices, int64_t count, const Wanted& wanted,
                                const Body& body) {
  const unsigned lanes_below = (1U << lane()) - 1;
  for (int64_t first = 0; first < count; first += kWarp) {
    const int64_t i = first + lane();
    const bool mine = i < count && wanted(choices[i]);
    const unsigned found = __ballot_sync(kAllLanes, mine);
    body(i, mine, __popc(found & lanes_below), __popc(found));
  }
}

/// A warp for each expert of each run: reads the run's choices, 4 bytes each, mostly from the L2
/// cache.
__global__ void count_kernel(int32_t* counts, const int32_t* choices, int64_t runs,
                             int64_t choices_per_run, int64_t E) {
  const int64_t run = warp_of_grid() / E, expert = warp_of_grid() % E;
  if (run >= runs) return;
  int count = 0;
  for_each_choice(
      choices + run * choices_per_run, choices_per_run, [&](int32_t c) { return c == expert; },
      [&](int64_t, bool, int, int found) { count += found; });
  if (lane() == 0) counts[run * E + expert] = count;
}

/// A warp for each expert of each run, as above; writes what it drops. `choices` are a copy, which
/// no other warp changes.
__global__ void drop_kernel(int32_t* kept, const int32_t* choices, const int32_t* before,
                            int64_t runs, int64_t choices_per_run, int64_t E, int64_t capacity) {
  const int64_t run = warp_of_grid() / E, expert = warp_of_grid() % E;
  if (run >= runs) return;
  const int64_t begin = run * choices_per_run;
  int64_t ahead = before[run * E + expert];
  for_each_choice(
      choices + begin, choices_per_run, [&](int32_t c) { return c == expert; },
      [&](int64_t i, bool mine, int below, int found) {
        if (mine && ahead + below >= capacity) kept[begin + i] = -1;
        ahead += found;
      });
}

/// A warp an expert: reads all choices twice, and writes the slots of its own. The first expert's
/// also answers those of -1, and so reads all once more.
__global__ void slots_kernel(int32_t* slots, const int32_t* choices, int64_t count, int64_t E) {
  const int64_t expert = warp_of_grid();
  if (expert >= E) return;
  int next = 0;  // the first slot after the rows of the experts before
  for_each_choice(
      choices, count, [&](int32_t c) { return c >= 0 && c < expert; },
      [&](int64_t, bool, int, int found) { next += found; });
  for_each_choice(
      choices, count, [&](int32_t c) { return c == expert; },
      [&](int64_t i, bool mine, int below, int found) {
        if (mine) slots[i] = next + below;
        if (expert == 0 && i < count && choices[i] < 0) slots[i] = -1;
        next += found;
      });
}

/// A block a token, W elements a thread at a time: reads x once, sizeof(T) bytes an element, and
/// writes as many for each slot.
template <class T, int W>
__global__ void permute_kernel(T* rows, const T* x, const int32_t* slots, int64_t H, int64_t k) {
  const int32_t* slot = slots + blockIdx.x * k;
  for (int64_t h = threadIdx.x * W; h < H; h += blockDim.x * W) {
    const auto numbers = load_pack<W>(x + blockIdx.x * H + h);
    for (int64_t j = 0; j < k; ++j) {
      if (slot[j] >= 0) store_pack(rows + slot[j] * H + h, numbers);
    }
  }
}

/// A block a token, W elements a thread at a time: reads the row of each slot and, where there is
/// one, that of `begin`, which may be y's, and writes y; sizeof(T) bytes an element of each.
template <class T, int W>
__global__ void unpermute_kernel(T* y, const T* rows, const int32_t* slots,
                                 const accumulate_t<T>* gates, const T* begin, int64_t H,
                                 int64_t k) {
  using A = accumulate_t<T>;
  const int64_t first = blockIdx.x * k;
  T* y_row = y + blockIdx.x * H;
  for (int64_t h = threadIdx.x * W; h < H; h += blockDim.x * W) {
    Numbers<A, W> sum{};
    if (begin != nullptr) sum = load_pack<W>(begin + blockIdx.x * H + h);
    for (int64_t i = first; i < first + k; ++i) {
      if (slots[i] < 0) continue;
      const auto numbers = load_pack<W>(rows + slots[i] * H + h);
      const A gate = gates == nullptr ? A{1} : gates[i];
      for (int w = 0; w < W; ++w) sum[w] += gate * numbers[w];
    }
    store_pack(y_row + h, sum);
  }
}

/// A warp a choice, W elements a lane at a time: reads dy, the row of its slot, and writes drows,
/// maybe in the row's place; 3 sizeof(T) bytes an element of a row.
/// Differentiates unpermute_kernel's `sum[w] += gate * numbers[w]`, by both factors.
template <class T, int W>
__global__ void unpermute_backward_kernel(T* drows, accumulate_t<T>* dgates, const T* dy,
                                          const T* rows, const int32_t* slots,
                                          const accumulate_t<T>* gates, int64_t H, int64_t k,
                                          int64_t count) {
  using A = accumulate_t<T>;
  const int64_t i = warp_of_grid();
  if (i >= count) return;
  const int64_t slot = slots[i];
  const T* dy_row = dy + i / k * H;
  A product = 0;
  for (int64_t h = lane() * W; slot >= 0 && h < H; h += kWarp * W) {
    auto d = load_pack<W>(dy_row + h);
    const auto numbers = load_pack<W>(rows + slot * H + h);
    for (int w = 0; w < W; ++w) product += d[w] * numbers[w];
    for (int w = 0; w < W; ++w) d[w] *= gates[i];
    store_pack(drows + slot * H + h, d);
  }
  product = warp_sum(product);
  if (lane() == 0) dgates[i] = product;
}

}  // namespace

void count_choices(cudaStream_t stream, int32_t* counts, const int32_t* choices, int64_t runs,
                   int64_t choices_per_run, int64_t E) {
  launch(count_kernel, ceil_div(runs * E * kWarp, kThreads), kThreads, 0, stream, counts, choices,
         runs, choices_per_run, E);
}

void drop_choices(cudaStream_t stream, int32_t* kept, const int32_t* choices, const int32_t* before,
                  int64_t runs, int64_t choices_per_run, int64_t E, int64_t capacity) {
  launch(drop_kernel, ceil_div(runs * E * kWarp, kThreads), kThreads, 0, stream, kept, choices,
         before, runs, choices_per_run, E, capacity);
}

void assign_slots(cudaStream_t stream, int32_t* slots, const int32_t* choices, int64_t count,
                  int64_t E) {
  launch(slots_kernel, ceil_div(E * kWarp, kThreads), kThreads, 0, stream, slots, choices, count,
         E);
}

template <class T>
void ExpertRows<T>::permute(cudaStream_t stream, T* rows, const T* x, const int32_t* slots,
                            int64_t tokens, int64_t H, int64_t k) {
  with_width<T>(H, {rows, x}, [&](auto width) {
    launch(permute_kernel<T, width>, tokens, kThreads, 0, stream, rows, x, slots, H, k);
  });
}

template <class T>
void ExpertRows<T>::unpermute(cudaStream_t stream, T* y, const T* rows, const int32_t* slots,
                              const A* gates, const T* begin, int64_t tokens, int64_t H,
                              int64_t k) {
  with_width<T>(H, {y, rows, begin}, [&](auto width) {
    launch(unpermute_kernel<T, width>, tokens, kThreads, 0, stream, y, rows, slots, gates, begin, H,
           k);
  });
}

template <class T>
void ExpertRows<T>::unpermute_backward(cudaStream_t stream, T* drows, A* dgates, const T* dy,
                                       const T* rows, const int32_t* slots, const A* gates,
                                       int64_t tokens, int64_t H, int64_t k) {
  with_width<T>(H, {drows, dy, rows}, [&](auto width) {
    launch(unpermute_backward_kernel<T, width>, ceil_div(tokens * k * kWarp, kThreads), kThreads, 0,
           stream, drows, dgates, dy, rows, slots, gates, H, k, tokens * k);
  });
}

template struct ExpertRows<float>;
template struct ExpertRows<double>;
template struct ExpertRows<bf16>;

}  // namespace usp::cuda
