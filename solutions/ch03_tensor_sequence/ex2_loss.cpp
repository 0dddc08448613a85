#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "judge/todo.h"

namespace usp {

/// The loss of each token, on every rank of `tp`: log of the sum of exp(logit) over the whole
/// vocabulary, minus the target's logit. A rank has columns [begin, begin + width) of the logits
/// [T, V]: `logits`, row by row. targets [T] are tokens of the whole vocabulary.
std::vector<double> vocab_parallel_loss(const Communicator& tp, std::span<const double> logits,
                                        std::span<const int64_t> targets, int64_t begin) {
  const int64_t T = std::ssize(targets), width = std::ssize(logits) / T;
  const auto logit = [&](int64_t token, int64_t column) { return logits[token * width + column]; };
  // One number a token: the ranks' sums, or the largest of the ranks' values.
  const auto reduce = [&](std::vector<double>& values, ReduceOp op) {
    const Tensor tensor = Tensor::from_host(values, {T}, DType::f64);
    tp.all_reduce(tensor, op);
    values = tensor.items();
  };
  std::vector<double> largest(T, -std::numeric_limits<double>::infinity());
  std::vector<double> sum(T), target(T), loss(T);
  // SOLUTION BEGIN (about 13 lines): largest, sum and target over the ranks, then the loss
  for (int64_t i = 0; i < T; ++i) {
    for (int64_t column = 0; column < width; ++column) {
      largest[i] = std::max(largest[i], logit(i, column));
    }
  }
  reduce(largest, ReduceOp::max);
  for (int64_t i = 0; i < T; ++i) {
    for (int64_t column = 0; column < width; ++column) {
      sum[i] += std::exp(logit(i, column) - largest[i]);
    }
    const int64_t own = targets[i] - begin;
    if (own >= 0 && own < width) target[i] = logit(i, own);
  }
  reduce(sum, ReduceOp::sum);
  reduce(target, ReduceOp::sum);
  for (int64_t i = 0; i < T; ++i) loss[i] = std::log(sum[i]) + largest[i] - target[i];
  // SOLUTION END
  return loss;
}

}  // namespace usp
