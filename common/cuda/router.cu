#include <climits>
#include <cmath>

#include "cuda/hopper.h"
#include "cuda/kernels.h"
#include "cuda/reduce.h"

/// Which experts a token goes to, and what balances them. Its row of scores is short, and a warp
/// has it: the lanes take experts in turn and meet by shuffles. T tokens, E experts, k choices.
/// What a kernel reads of a row more than once comes from the L1 cache after the first time.
namespace usp::cuda {

namespace {

constexpr int kRowsPerBlock = kThreads / kWarp;

/// The sum of x over a row, for every lane.
template <class A>
__device__ A row_sum(const A* x, int64_t E) {
  A sum = 0;
  for (int64_t e = lane(); e < E; e += kWarp) sum += x[e];
  return warp_sum(sum);
}

/// The sum of x y over a row, for every lane.
template <class A>
__device__ A row_product(const A* x, const A* y, int64_t E) {
  A sum = 0;
  for (int64_t e = lane(); e < E; e += kWarp) sum += x[e] * y[e];
  return warp_sum(sum);
}

/// The softmax of a row as maximum and sum, for every lane.
template <class A>
__device__ SoftmaxSum<A> row_softmax(const A* x, int64_t E) {
  SoftmaxSum<A> mine;
  for (int64_t e = lane(); e < E; e += kWarp) mine.add(x[e]);
  return warp_softmax_sum(mine);
}

/// 1 / x; of 0, where everything that it scales is 0 as well, 0.
template <class A>
__device__ A inverse_of(A x) {
  return x == 0 ? 0 : 1 / x;
}

/// Reads a row of logits, for softmax twice, and writes its scores, sizeof(A) bytes an element
/// each.
template <class A>
__global__ void scores_kernel(A* scores, const A* logits, int64_t T, int64_t E, bool sigmoid) {
  const int64_t t = warp_of_grid();
  if (t >= T) return;
  const A* x = logits + t * E;
  A* y = scores + t * E;
  if (sigmoid) {
    for (int64_t e = lane(); e < E; e += kWarp) y[e] = 1 / (1 + std::exp(-x[e]));
    return;
  }
  const SoftmaxSum<A> all = row_softmax(x, E);
  for (int64_t e = lane(); e < E; e += kWarp) y[e] = std::exp(x[e] - all.max) / all.sum;
}

/// Reads dscores and scores, for softmax twice, and writes dlogits, sizeof(A) bytes an element
/// each. dlogits may be dscores: whoever writes a number is the last to read it.
/// Differentiates scores_kernel's `1 / (1 + std::exp(-x[e]))`, or softmax's
/// `std::exp(x[e] - all.max) / all.sum`.
template <class A>
__global__ void scores_backward_kernel(A* dlogits, const A* dscores, const A* scores, int64_t T,
                                       int64_t E, bool sigmoid) {
  const int64_t t = warp_of_grid();
  if (t >= T) return;
  const A *dy = dscores + t * E, *y = scores + t * E;
  A* dx = dlogits + t * E;
  const A mean = sigmoid ? A{0} : row_product(dy, y, E);
  for (int64_t e = lane(); e < E; e += kWarp) {
    dx[e] = sigmoid ? dy[e] * y[e] * (1 - y[e]) : y[e] * (dy[e] - mean);
  }
}

/// A candidate in the order of choice: by its value, of equals the lower number first.
template <class A>
struct Ranked {
  A value;  ///< never NaN
  int number;

  /// Before all that there can be.
  __device__ static Ranked first() { return {kInfinity<A>, -1}; }
  /// Behind all that there can be.
  __device__ static Ranked last() { return {-kInfinity<A>, INT_MAX}; }
  __device__ static Ranked of(A value, int number) {
    return {value == value ? value : -kInfinity<A>, number};
  }
  __device__ bool before(const Ranked& other) const {
    return value > other.value || (value == other.value && number < other.number);
  }
};

/// Candidate that comes next after `previous`, of ranked(i) for i = begin, begin + step ... below
/// end.
template <class A, class Candidate>
__device__ Ranked<A> next_after(const Ranked<A>& previous, int begin, int end, int step,
                                const Candidate& ranked) {
  Ranked<A> best = Ranked<A>::last();
  for (int i = begin; i < end; i += step) {
    const Ranked<A> candidate = ranked(i);
    if (previous.before(candidate) && candidate.before(best)) best = candidate;
  }
  return best;
}

/// The first in the order of what the lanes have, for every lane.
template <class A>
__device__ Ranked<A> warp_first(Ranked<A> x) {
  for (int bit = kWarp / 2; bit > 0; bit /= 2) {
    const Ranked<A> other{__shfl_xor_sync(kAllLanes, x.value, bit),
                          __shfl_xor_sync(kAllLanes, x.number, bit)};
    if (other.before(x)) x = other;
  }
  return x;
}

/// What a token chooses by, and among which experts.
template <class A>
struct Choice {
  const A *scores, *bias;  ///< of all tokens; nullptr: 0
  int experts, groups, allowed, k;

  __device__ Ranked<A> expert(int64_t t, int e) const {
    const A score = scores[t * experts + e];
    return Ranked<A>::of(bias == nullptr ? score : score + bias[e], e);
  }
  /// The sum of the group's best.
  __device__ A group(int64_t t, int g) const {
    const int size = experts / groups;
    Ranked<A> last = Ranked<A>::first();
    A sum = 0;
    for (int i = 0; i < (k + allowed - 1) / allowed; ++i) {
      last = next_after(last, g * size, (g + 1) * size, 1, [&](int e) { return expert(t, e); });
      sum += last.value;
    }
    return sum;
  }
};

/// Looks for a choice after the other: reads the scores, sizeof(A) bytes each, and their bias k
/// times. Shared memory has a number for each group of each warp; a lane has a group, and reads its
/// experts for each expert that counts in its sum.
template <class A>
__global__ void choose_kernel(int32_t* choices, Choice<A> choice, int64_t T) {
  const int64_t t = warp_of_grid();
  if (t >= T) return;
  const int groups = choice.groups, size = choice.experts / groups;
  A* of_groups = dynamic_shared<A>() + warp() * groups;
  for (int g = lane(); groups > 1 && g < groups; g += kWarp) of_groups[g] = choice.group(t, g);
  __syncwarp();
  const auto group = [&](int g) { return Ranked<A>::of(of_groups[g], g); };
  Ranked<A> worst_group = Ranked<A>::first();  // of those that are allowed
  for (int i = 0; groups > 1 && i < choice.allowed; ++i) {
    worst_group = next_after(worst_group, 0, groups, 1, group);
  }
  const auto expert = [&](int e) {
    const bool closed = groups > 1 && worst_group.before(group(e / size));
    return closed ? Ranked<A>::last() : choice.expert(t, e);
  };
  Ranked<A> last = Ranked<A>::first();
  for (int j = 0; j < choice.k; ++j) {
    last = warp_first(next_after(last, lane(), choice.experts, kWarp, expert));
    if (lane() == 0) choices[t * choice.k + j] = last.number;
  }
}

/// The sum of a token's chosen scores, where gates are shares of it, else 1.
template <class A>
__device__ A divisor_of_gates(const A* scores, const int32_t* choices, int64_t k, bool normalised) {
  if (!normalised) return 1;
  A sum = 0;
  for (int64_t j = 0; j < k; ++j) sum += scores[choices[j]];
  return sum;
}

/// A thread a token: reads each choice and its score, twice where gates are shares, and writes its
/// gate. Threads side by side have tokens side by side: each takes a sector of 32 bytes of its own.
template <class A>
__global__ void gates_kernel(A* gates, const A* scores, const int32_t* choices, int64_t T,
                             int64_t E, int64_t k, bool normalised, A scale) {
  const int64_t t = thread_of_grid();
  if (t >= T) return;
  const A* score = scores + t * E;
  const int32_t* choice = choices + t * k;
  const A factor = scale * inverse_of(divisor_of_gates(score, choice, k, normalised));
  for (int64_t j = 0; j < k; ++j) gates[t * k + j] = score[choice[j]] * factor;
}

/// A thread a token, as above: reads each choice, dgates and dscores, writes dscores; where gates
/// are shares it has read choice, score, dgates and gates before.
/// Differentiates gates_kernel's `score[choice[j]] * factor`; the factor holds all k scores.
template <class A>
__global__ void gates_backward_kernel(A* dscores, const A* dgates, const A* gates, const A* scores,
                                      const int32_t* choices, int64_t T, int64_t E, int64_t k,
                                      bool normalised, A scale) {
  const int64_t t = thread_of_grid();
  if (t >= T) return;
  const int32_t* choice = choices + t * k;
  const A inverse = inverse_of(divisor_of_gates(scores + t * E, choice, k, normalised));
  A along = 0;  // a larger score makes every gate of the token smaller
  for (int64_t j = 0; normalised && j < k; ++j) along += dgates[t * k + j] * gates[t * k + j];
  for (int64_t j = 0; j < k; ++j) {
    dscores[t * E + choice[j]] += (scale * dgates[t * k + j] - along) * inverse;
  }
}

/// Reads scores, twice where they are normalised, and their run's load, sizeof(A) bytes an element
/// each. One lane writes the term.
template <class A>
__global__ void balance_terms_kernel(double* terms, const A* scores, const A* load, int64_t T,
                                     int64_t E, int64_t tokens_per_run, bool normalised) {
  const int64_t t = warp_of_grid();
  if (t >= T) return;
  const A* x = scores + t * E;
  const A sum = row_product(x, load + t / tokens_per_run * E, E);
  const A inverse = normalised ? inverse_of(row_sum(x, E)) : A{1};
  if (lane() == 0) terms[t] = static_cast<double>(sum * inverse);
}

/// Reads the load and dscores, and writes dscores, sizeof(A) bytes an element each; where scores
/// are normalised it has read them twice before, and the load once.
/// Differentiates balance_terms_kernel's `sum * inverse`.
template <class A>
__global__ void balance_backward_kernel(A* dscores, const A* scores, const A* load, int64_t T,
                                        int64_t E, int64_t tokens_per_run, A scale,
                                        bool normalised) {
  const int64_t t = warp_of_grid();
  if (t >= T) return;
  const A *x = scores + t * E, *of_expert = load + t / tokens_per_run * E;
  const A inverse = normalised ? inverse_of(row_sum(x, E)) : A{1};
  // Shares add up to 1: what all loads have in common changes nothing.
  const A mean = normalised ? row_product(x, of_expert, E) * inverse : A{0};
  for (int64_t e = lane(); e < E; e += kWarp) {
    dscores[t * E + e] += scale * inverse * (of_expert[e] - mean);
  }
}

/// Reads logits, sizeof(A) bytes an element. One lane writes the term.
template <class A>
__global__ void z_terms_kernel(double* terms, const A* logits, int64_t T, int64_t E) {
  const int64_t t = warp_of_grid();
  if (t >= T) return;
  const SoftmaxSum<A> all = row_softmax(logits + t * E, E);
  const A z = all.max + std::log(all.sum);
  if (lane() == 0) terms[t] = static_cast<double>(z * z);
}

/// Reads logits twice and dlogits, and writes dlogits, sizeof(A) bytes an element each.
/// Differentiates z_terms_kernel's `z * z`, where z is `all.max + std::log(all.sum)`.
template <class A>
__global__ void z_backward_kernel(A* dlogits, const A* logits, int64_t T, int64_t E, A scale) {
  const int64_t t = warp_of_grid();
  if (t >= T) return;
  const A* x = logits + t * E;
  const SoftmaxSum<A> all = row_softmax(x, E);
  const A z = all.max + std::log(all.sum);
  for (int64_t e = lane(); e < E; e += kWarp) {
    dlogits[t * E + e] += 2 * scale * z * std::exp(x[e] - z);
  }
}

/// Reads scores twice, sizeof(A) bytes an element. One lane writes the term.
template <class A>
__global__ void entropy_terms_kernel(double* terms, const A* scores, int64_t T, int64_t E) {
  const int64_t t = warp_of_grid();
  if (t >= T) return;
  const A* x = scores + t * E;
  const A inverse = inverse_of(row_sum(x, E));
  A entropy = 0;
  for (int64_t e = lane(); e < E; e += kWarp) {
    const A p = x[e] * inverse;
    if (p != 0) entropy -= p * std::log(p);  // NaN reaches the sum
  }
  entropy = warp_sum(entropy);
  if (lane() == 0) terms[t] = static_cast<double>(entropy);
}

/// One block: a thread adds every 256th term, 8 bytes each, then the block its threads' sums.
__global__ void add_terms_kernel(double* sum, const double* terms, int64_t T, double scale) {
  double mine = 0;
  for (int64_t t = threadIdx.x; t < T; t += blockDim.x) mine += terms[t];
  __shared__ double of_warps[kWarp];
  mine = block_sum(mine, of_warps);
  if (threadIdx.x == 0) *sum += scale * mine;
}

/// One block, for the mean of all loads: reads the load twice and the bias, and writes the bias,
/// sizeof(A) bytes an expert each.
template <class A>
__global__ void bias_kernel(A* bias, const A* load, int64_t E, A rate) {
  double sum = 0;
  for (int64_t e = threadIdx.x; e < E; e += blockDim.x) sum += static_cast<double>(load[e]);
  __shared__ double of_warps[kWarp];
  const double mean = block_sum(sum, of_warps) / static_cast<double>(E);
  for (int64_t e = threadIdx.x; e < E; e += blockDim.x) {
    const auto of_expert = static_cast<double>(load[e]);
    if (of_expert < mean) bias[e] += rate;
    if (of_expert > mean) bias[e] -= rate;
  }
}

void add_terms(cudaStream_t stream, double* sum, const double* terms, int64_t T, double scale) {
  launch(add_terms_kernel, 1, kThreads, 0, stream, sum, terms, T, scale);
}

}  // namespace

template <class A>
void Router<A>::scores(cudaStream_t stream, A* scores, const A* logits, int64_t T, int64_t E,
                       bool sigmoid) {
  launch(scores_kernel<A>, ceil_div(T, kRowsPerBlock), kThreads, 0, stream, scores, logits, T, E,
         sigmoid);
}

template <class A>
void Router<A>::scores_backward(cudaStream_t stream, A* dlogits, const A* dscores, const A* scores,
                                int64_t T, int64_t E, bool sigmoid) {
  launch(scores_backward_kernel<A>, ceil_div(T, kRowsPerBlock), kThreads, 0, stream, dlogits,
         dscores, scores, T, E, sigmoid);
}

template <class A>
void Router<A>::choose(cudaStream_t stream, int32_t* choices, const A* scores, const A* bias,
                       int64_t T, int64_t E, int64_t k, int64_t groups, int64_t allowed) {
  const Choice<A> choice{scores, bias, int(E), int(groups), int(allowed), int(k)};
  launch(choose_kernel<A>, ceil_div(T, kRowsPerBlock), kThreads,
         kRowsPerBlock * groups * int64_t{sizeof(A)}, stream, choices, choice, T);
}

template <class A>
void Router<A>::gates(cudaStream_t stream, A* gates, const A* scores, const int32_t* choices,
                      int64_t T, int64_t E, int64_t k, bool normalised, double scale) {
  launch(gates_kernel<A>, ceil_div(T, kThreads), kThreads, 0, stream, gates, scores, choices, T, E,
         k, normalised, A(scale));
}

template <class A>
void Router<A>::gates_backward(cudaStream_t stream, A* dscores, const A* dgates, const A* gates,
                               const A* scores, const int32_t* choices, int64_t T, int64_t E,
                               int64_t k, bool normalised, double scale) {
  launch(gates_backward_kernel<A>, ceil_div(T, kThreads), kThreads, 0, stream, dscores, dgates,
         gates, scores, choices, T, E, k, normalised, A(scale));
}

template <class A>
void Router<A>::balance_loss(cudaStream_t stream, double* loss, double* terms, const A* scores,
                             const A* load, int64_t T, int64_t E, int64_t tokens_per_run,
                             double scale, bool normalised) {
  launch(balance_terms_kernel<A>, ceil_div(T, kRowsPerBlock), kThreads, 0, stream, terms, scores,
         load, T, E, tokens_per_run, normalised);
  add_terms(stream, loss, terms, T, scale);
}

template <class A>
void Router<A>::balance_loss_backward(cudaStream_t stream, A* dscores, const A* scores,
                                      const A* load, int64_t T, int64_t E, int64_t tokens_per_run,
                                      double scale, bool normalised) {
  launch(balance_backward_kernel<A>, ceil_div(T, kRowsPerBlock), kThreads, 0, stream, dscores,
         scores, load, T, E, tokens_per_run, A(scale), normalised);
}

template <class A>
void Router<A>::z_loss(cudaStream_t stream, double* loss, double* terms, const A* logits, int64_t T,
                       int64_t E, double scale) {
  launch(z_terms_kernel<A>, ceil_div(T, kRowsPerBlock), kThreads, 0, stream, terms, logits, T, E);
  add_terms(stream, loss, terms, T, scale);
}

template <class A>
void Router<A>::z_loss_backward(cudaStream_t stream, A* dlogits, const A* logits, int64_t T,
                                int64_t E, double scale) {
  launch(z_backward_kernel<A>, ceil_div(T, kRowsPerBlock), kThreads, 0, stream, dlogits, logits, T,
         E, A(scale));
}

template <class A>
void Router<A>::entropy(cudaStream_t stream, double* sum, double* terms, const A* scores, int64_t T,
                        int64_t E) {
  launch(entropy_terms_kernel<A>, ceil_div(T, kRowsPerBlock), kThreads, 0, stream, terms, scores, T,
         E);
  add_terms(stream, sum, terms, T, 1);
}

template <class A>
void Router<A>::balance_bias(cudaStream_t stream, A* bias, const A* load, int64_t E, double rate) {
  launch(bias_kernel<A>, 1, kThreads, 0, stream, bias, load, E, A(rate));
}

template struct Router<float>;
template struct Router<double>;

}  // namespace usp::cuda
