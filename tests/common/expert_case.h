#pragma once

#include <algorithm>
#include <numeric>

#include "tensor/expert_ops.h"
#include "tensor/ops.h"
#include "testing.h"

/// What the tests of a mixture of experts share: random choices, and where rows come to lie.
namespace usp::test {

using Numbers = std::vector<int32_t>;

inline constexpr DType kRouterDTypes[] = {DType::f64, DType::f32};

/// The elements of a tensor of numbers.
inline Numbers numbers_of(const Tensor& tensor) {
  const Values values = tensor.items();
  return {values.begin(), values.end()};
}

/// 0, 1, ... count - 1 in this order, those with the highest key first, equals as they were.
inline Numbers sorted_by(int64_t count, const std::function<double(int32_t)>& key) {
  Numbers order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return key(a) > key(b); });
  return order;
}

/// Which k of E experts each of T tokens goes to, all different. Of the choices, a share `dropped`
/// is -1. An expert `idle` is nobody's choice.
inline Numbers random_choices(Random& random, int64_t T, int64_t E, int64_t k, double dropped = 0,
                              int64_t idle = -1) {
  Numbers choices;
  for (int64_t t = 0; t < T; ++t) {
    Values keys = random.normals(E);
    if (idle >= 0) keys[idle] = -kInf;
    const Numbers order = sorted_by(E, [&](int32_t e) { return keys[e]; });
    for (int64_t j = 0; j < k; ++j) {
      const bool drop = double(random.integer(0, 999)) < 1000 * dropped;
      choices.push_back(drop ? -1 : order[j]);
    }
  }
  return choices;
}

/// How many of the choices fell on each of E experts.
inline std::vector<int64_t> counts_of(const Numbers& choices, int64_t E) {
  std::vector<int64_t> counts(E);
  for (int32_t choice : choices) {
    if (choice >= 0) ++counts[choice];
  }
  return counts;
}

/// Tokens on their way to experts: choices [T, k], and the slots of their rows.
struct Routes {
  Routes(Random& random, int64_t T, int64_t E, int64_t k, double dropped = 0, int64_t idle = -1)
      : T(T),
        E(E),
        k(k),
        chosen(random_choices(random, T, E, k, dropped, idle)),
        counts(counts_of(chosen, E)),
        R(std::accumulate(counts.begin(), counts.end(), int64_t{0})),
        choices(Tensor::from_host(chosen, {T, k})),
        slots(Tensor::empty({T, k}, DType::i32)) {
    ops::assign_slots(slots, choices, counts);
  }

  int64_t T, E, k;
  Numbers chosen;
  std::vector<int64_t> counts;
  int64_t R;  ///< rows
  Tensor choices, slots;
};

}  // namespace usp::test
