#include "cuda/kernels.h"
#include "cuda/reduce.h"

/// Looking up rows of a table, and adding up their gradients by row. Many tokens may want one row:
/// instead of adding to it by atomics, in whatever order they arrive, each row has a warp that
/// looks for its tokens. So the sum has the order of the tokens, and two runs give the same bits.
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

/// A warp has 32 W columns of one row of the table. It reads all tokens, 32 at a time, and adds the
/// rows of dy whose tokens are its own, in registers. dy is read once, dtable written once (and
/// read where it accumulates); the tokens, 4 bytes each, are read once per warp, mostly from the L2
/// cache. Warps of the grid are numbered by columns first.
template <class T, class G, int W>
__global__ void backward_kernel(G* dtable, const T* dy, const int32_t* tokens, int64_t num_tokens,
                                int64_t V, int64_t H, int64_t vocab_offset, bool accumulate,
                                int64_t warps_per_row) {
  using A = accumulate_t<T>;
  const int64_t row = warp_of_grid() / warps_per_row;
  const int64_t h = (warp_of_grid() % warps_per_row * kWarp + lane()) * W;
  if (row >= V) return;
  const bool mine = h < H;  // the others help to look for tokens
  Numbers<A, W> sum{};
  if (accumulate && mine) sum = load_pack<W>(dtable + row * H + h);
  for (int64_t first = 0; first < num_tokens; first += kWarp) {
    const int64_t t = first + lane();
    const bool wanted = t < num_tokens && tokens[t] - vocab_offset == row;
    unsigned found = __ballot_sync(kAllLanes, wanted);
    for (; found != 0; found &= found - 1) {  // takes out the lowest bit
      const int64_t token = first + __ffs(static_cast<int>(found)) - 1;
      if (!mine) continue;
      const auto numbers = load_pack<W>(dy + token * H + h);
      for (int w = 0; w < W; ++w) sum[w] += numbers[w];
    }
  }
  if (mine) store_pack(dtable + row * H + h, sum);
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

template <class T, class G>
void EmbeddingTable<T, G>::backward(cudaStream_t stream, G* dtable, const T* dy,
                                    const int32_t* tokens, int64_t num_tokens, int64_t V, int64_t H,
                                    int64_t vocab_offset, bool accumulate) {
  with_width<G>(H, {dtable, dy}, [&](auto width) {
    const int64_t warps_per_row = ceil_div(H, kWarp * width);
    launch(backward_kernel<T, G, width>, ceil_div(V * warps_per_row * kWarp, kThreads), kThreads, 0,
           stream, dtable, dy, tokens, num_tokens, V, H, vocab_offset, accumulate, warps_per_row);
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
