#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <span>

#include "base/rng.h"
#include "cuda/numbers.h"
#include "tensor/positions.h"

/// The kernels as the host starts them: pointers into the GPU's memory, sizes, strides in elements.
/// tensor/ops.h and tensor/expert_ops.h say what each computes. Nothing here waits; `stream` keeps
/// the order. T is float, double or bf16, A the type of its sums; rows of matrices lie side by
/// side. A .cu file has each struct's kernels.
///
/// Positions and random streams go to the GPU by value, with the code that reads them.
namespace usp::cuda {

/// elementwise.cu
template <class T>
struct Elementwise {
  using A = accumulate_t<T>;
  static void fill(cudaStream_t stream, T* y, int64_t count, double value);
  static void add(cudaStream_t stream, T* y, const T* a, const T* b, int64_t count);
  static void accumulate(cudaStream_t stream, A* sum, const T* x, int64_t count);
  static void swiglu_forward(cudaStream_t stream, T* y, const T* gate_up, int64_t rows, int64_t F);
  static void swiglu_backward(cudaStream_t stream, T* dgate_up, const T* dy, const T* gate_up,
                              int64_t rows, int64_t F);
  static void dropout(cudaStream_t stream, T* y, const T* x, int64_t rows, int64_t H, double rate,
                      const RandomStream& random, int64_t first_row);
};

/// Two tensors of one shape, each with its strides. Axes of size 1 fill up what is not used.
struct CopyShape {
  std::array<int64_t, 5> sizes, to, from;
  bool contiguous;  ///< both
};

/// copy.cu; To and From are T, or both int32_t
template <class To, class From>
struct Copy {
  static void run(cudaStream_t stream, To* y, const From* x, const CopyShape& shape);
};

/// Matrices of any strides, the first of which begins at `data`.
template <class T>
struct Strided {
  T* data;
  int64_t batch, row, column;

  __device__ T* at(int64_t b, int64_t i, int64_t j) const {
    return data + b * batch + i * row + j * column;
  }
};

/// matmul.cu; G is T or A
template <class T, class G>
struct Matmul {
  /// c = a b, or c += a b, for `count` matrices: c [m, n], a [m, k], b [k, n].
  static void run(cudaStream_t stream, const Strided<G>& c, const Strided<T>& a,
                  const Strided<T>& b, int64_t count, int64_t m, int64_t n, int64_t k,
                  bool accumulate);
};

/// Rows of D channels: (b, s, n) of x [B, S, N, D] begins at data[b sample + s row + n head].
template <class T>
struct Heads {
  T* data;
  int64_t sample, row, head;

  __device__ T* at(int64_t b, int64_t s, int64_t n) const {
    return data + b * sample + s * row + n * head;
  }
};

/// rope.cu
template <class T>
struct Rope {
  using A = accumulate_t<T>;
  static void run(cudaStream_t stream, const Heads<T>& x, const A* cos, const A* sin,
                  const Positions& positions, bool inverse, int64_t B, int64_t S, int64_t N,
                  int64_t D);
};

/// embedding.cu
template <class T>
struct Embedding {
  static void forward(cudaStream_t stream, T* y, const T* table, const int32_t* tokens,
                      int64_t num_tokens, int64_t V, int64_t H, int64_t vocab_offset);
};
/// embedding.cu: elements of the workspace of EmbeddingTable::backward(), of int32_t
int64_t embedding_backward_workspace(int64_t num_tokens, int64_t V);

/// embedding.cu; the gradients of a table are in G: A or T
template <class T, class G>
struct EmbeddingTable {
  static void backward(cudaStream_t stream, G* dtable, const T* dy, const int32_t* tokens,
                       int64_t num_tokens, int64_t V, int64_t H, int64_t vocab_offset,
                       bool accumulate, int32_t* workspace);
};

/// rmsnorm.cu; dresidual may be nullptr
template <class T>
struct RmsNorm {
  using A = accumulate_t<T>;
  static void forward(cudaStream_t stream, T* y, A* rstd, const T* x, const T* weight, int64_t rows,
                      int64_t H, double eps);
  static void backward_input(cudaStream_t stream, T* dx, const T* dy, const T* x, const T* weight,
                             const A* rstd, const T* dresidual, int64_t rows, int64_t H);
};
/// The rows of the workspace that the next needs.
int64_t rmsnorm_partial_sums(int64_t rows);
/// rmsnorm.cu; partial [rmsnorm_partial_sums(rows), H] is a workspace, G as above
template <class T, class G>
struct RmsNormWeight {
  using A = accumulate_t<T>;
  static void backward(cudaStream_t stream, G* dweight, A* partial, const T* dy, const T* x,
                       const A* rstd, int64_t rows, int64_t H, bool accumulate);
};

/// softmax.cu; a row is one query of one of N heads: rows = B N S. begins [B, S] or nullptr.
template <class T>
struct CausalSoftmax {
  using A = accumulate_t<T>;
  static void forward(cudaStream_t stream, T* probs, A* lse, const T* scores, double scale,
                      const Positions& queries, const Positions& keys, const int32_t* begins,
                      int64_t rows, int64_t heads);
  static void backward(cudaStream_t stream, T* dscores, const T* dprobs, const T* probs,
                       const A* delta, double scale, int64_t rows, int64_t K);
  static void rescale(cudaStream_t stream, T* probs, const A* part_lse, const A* lse, int64_t rows,
                      int64_t K);
};

/// cross_entropy.cu
template <class T>
struct CrossEntropy {
  using A = accumulate_t<T>;
  static void forward(cudaStream_t stream, A* row_max, A* row_sum, A* target_logit, const T* logits,
                      const int32_t* targets, int64_t rows, int64_t V, int64_t vocab_offset);
  static void backward(cudaStream_t stream, T* dlogits, const T* logits, const int32_t* targets,
                       const A* lse, int64_t rows, int64_t V, int64_t vocab_offset, double scale);
};
/// cross_entropy.cu
template <class A>
struct CrossEntropyRows {
  static void rescale(cudaStream_t stream, A* row_sum, const A* row_max, const A* max,
                      int64_t rows);
  static void loss(cudaStream_t stream, double* loss, A* lse, const A* row_max, const A* row_sum,
                   const A* target_logit, int64_t rows, double scale);
};

/// Sizes and operands of blockwise attention.
template <class T>
struct AttentionProblem {
  int64_t B, S, N, D, K, G;
  Heads<const T> q, k, v;
  double scale;
  Positions queries, keys;
  const int32_t* begins = nullptr;  ///< [B, S] of documents
  int64_t value_dim = 0;            ///< as Backend::promise_values() has it
};
/// Channels per head that blockwise attention has registers for.
inline constexpr int64_t kMaxHeadDim = 256;

/// attention.cu; the output is in O: T, or A where it is to be merged
template <class T, class O>
struct Attention {
  using A = accumulate_t<T>;
  static void forward(cudaStream_t stream, const Heads<O>& out, A* lse,
                      const AttentionProblem<T>& problem);
};
/// attention.cu
template <class A>
struct AttentionParts {
  static void merge(cudaStream_t stream, const Heads<A>& out, A* lse,
                    const Heads<const A>& part_out, const A* part_lse, int64_t B, int64_t S,
                    int64_t N, int64_t D);
};
/// attention.cu
template <class T>
struct AttentionDelta {
  using A = accumulate_t<T>;
  static void run(cudaStream_t stream, A* delta, const Heads<const T>& dout,
                  const Heads<const T>& out, int64_t B, int64_t S, int64_t N, int64_t D);
};
/// attention_backward.cu; what backward reads besides the problem, and where its results go: in O,
/// T or, where more is added, A
template <class T, class O>
struct AttentionGradients {
  using A = accumulate_t<T>;
  Heads<O> dq, dk, dv;
  Heads<const T> dout;
  const A *lse, *delta;
  bool accumulate;
  /// Bytes of shared memory of one block, for heads of D channels: more than forward takes.
  static int64_t shared_bytes(int64_t D);
  /// Writes dq, dk and dv, or adds to them.
  void backward(cudaStream_t stream, const AttentionProblem<T>& problem) const;
};

/// router.cu; T tokens, E experts, k choices, A float or double. terms [T] is a workspace.
template <class A>
struct Router {
  static void scores(cudaStream_t stream, A* scores, const A* logits, int64_t T, int64_t E,
                     bool sigmoid);
  static void scores_backward(cudaStream_t stream, A* dlogits, const A* dscores, const A* scores,
                              int64_t T, int64_t E, bool sigmoid);
  /// bias may be nullptr
  static void choose(cudaStream_t stream, int32_t* choices, const A* scores, const A* bias,
                     int64_t T, int64_t E, int64_t k, int64_t groups, int64_t allowed);
  static void gates(cudaStream_t stream, A* gates, const A* scores, const int32_t* choices,
                    int64_t T, int64_t E, int64_t k, bool normalised, double scale);
  static void gates_backward(cudaStream_t stream, A* dscores, const A* dgates, const A* gates,
                             const A* scores, const int32_t* choices, int64_t T, int64_t E,
                             int64_t k, bool normalised, double scale);
  static void balance_loss(cudaStream_t stream, double* loss, double* terms, const A* scores,
                           const A* load, int64_t T, int64_t E, int64_t tokens_per_run,
                           double scale, bool normalised);
  static void balance_loss_backward(cudaStream_t stream, A* dscores, const A* scores, const A* load,
                                    int64_t T, int64_t E, int64_t tokens_per_run, double scale,
                                    bool normalised);
  static void z_loss(cudaStream_t stream, double* loss, double* terms, const A* logits, int64_t T,
                     int64_t E, double scale);
  static void z_loss_backward(cudaStream_t stream, A* dlogits, const A* logits, int64_t T,
                              int64_t E, double scale);
  static void entropy(cudaStream_t stream, double* sum, double* terms, const A* scores, int64_t T,
                      int64_t E);
  static void balance_bias(cudaStream_t stream, A* bias, const A* load, int64_t E, double rate);
};

/// experts.cu; choices of `runs` runs, one after the other
void count_choices(cudaStream_t stream, int32_t* counts, const int32_t* choices, int64_t runs,
                   int64_t choices_per_run, int64_t E);
/// experts.cu; kept holds what `choices` does, of which some become -1
void drop_choices(cudaStream_t stream, int32_t* kept, const int32_t* choices, const int32_t* before,
                  int64_t runs, int64_t choices_per_run, int64_t E, int64_t capacity);
/// experts.cu; of `count` choices
void assign_slots(cudaStream_t stream, int32_t* slots, const int32_t* choices, int64_t count,
                  int64_t E);
/// experts.cu; k slots a token. gates and begin of unpermute may be nullptr.
template <class T>
struct ExpertRows {
  using A = accumulate_t<T>;
  static void permute(cudaStream_t stream, T* rows, const T* x, const int32_t* slots,
                      int64_t tokens, int64_t H, int64_t k);
  static void unpermute(cudaStream_t stream, T* y, const T* rows, const int32_t* slots,
                        const A* gates, const T* begin, int64_t tokens, int64_t H, int64_t k);
  static void unpermute_backward(cudaStream_t stream, T* drows, A* dgates, const T* dy,
                                 const T* rows, const int32_t* slots, const A* gates,
                                 int64_t tokens, int64_t H, int64_t k);
};

/// The numbers of an AdamW update that are the same for all elements.
template <class A>
struct AdamWFactors {
  A beta1, beta2, fresh1, fresh2;  ///< what is kept of the moments, and what is new
  A unbias1, unbias2;              ///< 1 / (1 - beta^step)
  A eps, lr;
};

/// Ranges of memory for one launch of a kernel, each with some blocks of its own: `first_block` and
/// those before the next range's. At most 2 KiB among the kernel's parameters, which have room
/// for 4.
template <class Range>
struct RangesOfLaunch {
  static constexpr int kMost = 32;

  Range of[kMost];
  int size = 0;
  int64_t blocks = 0;

  /// Returns whether there is room for another one after this.
  bool add(const Range& range, int64_t blocks_of_it) {
    of[size] = range;
    of[size++].first_block = blocks;
    blocks += blocks_of_it;
    return size < kMost;
  }
};

/// optimizer.cu; gradients are in G: A or T
template <class T, class G>
struct AdamW {
  using A = accumulate_t<T>;
  /// What AdamWRange in backend.h says, by addresses.
  struct Range {
    T* value;
    A *master, *m, *v;
    const G* grad;
    int64_t count;
    A keep;  ///< what weight decay leaves
    int64_t first_block = 0;
  };
  using Ranges = RangesOfLaunch<Range>;  ///< of one launch

  static void run(cudaStream_t stream, std::span<const Range> ranges, const double* coefficient,
                  const AdamWFactors<A>& factors);
};
/// The size of the workspace that the next needs.
int64_t sum_squares_partial_sums(int64_t count);
/// optimizer.cu; partial is a workspace with sum_squares_partial_sums() of each range
template <class T>
struct SumSquares {
  /// One tensor.
  struct Range {
    const T* x;
    int64_t count;
    int64_t first_block = 0;
  };
  using Ranges = RangesOfLaunch<Range>;  ///< of one launch

  static void run(cudaStream_t stream, double* sum, double* partial, std::span<const Range> ranges,
                  bool accumulate);
};
/// optimizer.cu
void clip_coefficient(cudaStream_t stream, double* coefficient, double* norm, const double* sums,
                      int64_t count, double max_norm);

}  // namespace usp::cuda
