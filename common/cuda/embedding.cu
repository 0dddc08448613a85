#include "cuda/kernels.h"
#include "cuda/launch.h"

/// Looking up rows of a table, and adding up their gradients by row. Many tokens may want one row:
/// instead of adding to it by atomics, in whatever order they arrive, the tokens of a row are first
/// linked to a list. So the sum has the order of the tokens, and two runs give the same bits.
namespace usp::cuda {

namespace {

/// A block a token: copies its row, or zeros where the table does not hold it; 2 sizeof(T) bytes an
/// element, W elements a thread at a time.
template <class T, int W>
__global__ void forward_kernel(T* y, const T* table, const int32_t* tokens, int64_t V, int64_t H,
                               int64_t vocab_offset) {
  using A = accumulate_t<T>;
  const int64_t row = tokens[blockIdx.x] - vocab_offset;
  const bool here = row >= 0 && row < V;
  for (int64_t h = threadIdx.x * W; h < H; h += blockDim.x * W) {
    store_pack(y + blockIdx.x * H + h, here ? load_pack<W>(table + row * H + h) : Numbers<A, W>{});
  }
}

constexpr int kChunk = 512;  ///< tokens that are linked at a time

/// One block: next[t] becomes the next token of the same row, -1 behind the last, and begins[t],
/// which holds 0, whether t is the first of its row. last [V] holds -1, and then the last token of
/// each row so far. A token looks for the one before it and the one behind it among those of its
/// chunk, in shared memory.
__global__ void link_kernel(int32_t* next, int32_t* begins, int32_t* last, const int32_t* tokens,
                            int64_t num_tokens, int64_t V, int64_t vocab_offset) {
  __shared__ int64_t rows[kChunk];
  const int i = static_cast<int>(threadIdx.x);
  for (int64_t first = 0; first < num_tokens; first += kChunk) {
    const int64_t t = first + i;
    const int64_t wanted = t < num_tokens ? tokens[t] - vocab_offset : -1;
    rows[i] = wanted < V ? wanted : -1;
    __syncthreads();
    const int64_t row = rows[i];  // negative: none of this table
    int before = i - 1, after = i + 1;
    while (row >= 0 && before >= 0 && rows[before] != row) --before;
    while (row >= 0 && after < kChunk && rows[after] != row) ++after;
    if (row >= 0) next[t] = after < kChunk ? static_cast<int32_t>(first + after) : -1;
    if (row >= 0 && before < 0) {  // the first of the chunk, which alone has to do with last[row]
      const int32_t previous = last[row];
      int newest = i;
      for (int other = after; other < kChunk; ++other) newest = rows[other] == row ? other : newest;
      begins[t] = previous < 0;
      if (previous >= 0) next[previous] = static_cast<int32_t>(t);
      last[row] = static_cast<int32_t>(first + newest);
    }
    __syncthreads();
  }
}

/// A warp has 32 W columns of a token that is the first of its row, and adds the rows of dy of all
/// tokens in its list, in registers: dy is read once, and of dtable what tokens occur is written
/// once (and read where it accumulates). Warps of the grid are numbered by columns first.
/// Differentiates forward_kernel's `here ? load_pack<W>(table + row * H + h) : Numbers<A, W>{}`.
template <class T, class G, int W>
__global__ void backward_kernel(G* dtable, const T* dy, const int32_t* tokens, const int32_t* next,
                                const int32_t* begins, int64_t num_tokens, int64_t H,
                                int64_t vocab_offset, bool accumulate, int64_t warps_per_row) {
  using A = accumulate_t<T>;
  const int64_t token = warp_of_grid() / warps_per_row;
  const int64_t h = (warp_of_grid() % warps_per_row * kWarp + lane()) * W;
  if (token >= num_tokens || begins[token] == 0 || h >= H) return;
  G* to = dtable + (tokens[token] - vocab_offset) * H + h;
  Numbers<A, W> sum{};
  if (accumulate) sum = load_pack<W>(to);
  for (int64_t t = token; t >= 0; t = next[t]) {
    const auto numbers = load_pack<W>(dy + t * H + h);
    for (int w = 0; w < W; ++w) sum[w] += numbers[w];
  }
  store_pack(to, sum);
}

}  // namespace

template <class T>
void Embedding<T>::forward(cudaStream_t stream, T* y, const T* table, const int32_t* tokens,
                           int64_t num_tokens, int64_t V, int64_t H, int64_t vocab_offset) {
  with_width<T>(H, {y, table}, [&](auto width) {
    launch(forward_kernel<T, width>, num_tokens, kThreads, 0, stream, y, table, tokens, V, H,
           vocab_offset);
  });
}

int64_t embedding_backward_workspace(int64_t num_tokens, int64_t V) { return 2 * num_tokens + V; }

template <class T, class G>
void EmbeddingTable<T, G>::backward(cudaStream_t stream, G* dtable, const T* dy,
                                    const int32_t* tokens, int64_t num_tokens, int64_t V, int64_t H,
                                    int64_t vocab_offset, bool accumulate, int32_t* workspace) {
  if (!accumulate) USP_CUDA(cudaMemsetAsync(dtable, 0, V * H * sizeof(G), stream));
  if (num_tokens == 0) return;
  int32_t *next = workspace, *begins = next + num_tokens, *last = begins + num_tokens;
  USP_CUDA(cudaMemsetAsync(begins, 0, num_tokens * sizeof(int32_t), stream));
  USP_CUDA(cudaMemsetAsync(last, 0xff, V * sizeof(int32_t), stream));
  launch(link_kernel, 1, kChunk, 0, stream, next, begins, last, tokens, num_tokens, V,
         vocab_offset);
  with_width<G>(H, {dtable, dy}, [&](auto width) {
    const int64_t warps_per_row = ceil_div(H, kWarp * width);
    launch(backward_kernel<T, G, width>, ceil_div(num_tokens * warps_per_row * kWarp, kThreads),
           kThreads, 0, stream, dtable, dy, tokens, next, begins, num_tokens, H, vocab_offset,
           accumulate, warps_per_row);
  });
}

template struct Embedding<float>;
template struct Embedding<double>;
template struct Embedding<bf16>;
template struct EmbeddingTable<float, float>;
template struct EmbeddingTable<double, double>;
template struct EmbeddingTable<bf16, float>;
template struct EmbeddingTable<bf16, bf16>;

}  // namespace usp::cuda
