#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "tensor/expert_ops.h"

namespace usp::cpu {

namespace {

/// Calls body(A{}) with the type that routers compute with: float or double.
template <class Body>
void dispatch_acc(DType dtype, Body body) {
  dtype == DType::f64 ? body(double{}) : body(float{});
}

/// The sum of the terms that value(row) gives, in the order of the rows: the same bits for any
/// number of threads. `cost`: elements of a row.
template <class Value>
double sum_over_rows(int64_t rows, int64_t cost, Value value) {
  const Tensor of_rows = workspace({rows}, DType::f64);
  double* terms = of_rows.data<double>();
  parallel_for(rows, cost, [=](int64_t row) { terms[row] = static_cast<double>(value(row)); });
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row) sum += terms[row];
  return sum;
}

template <class A>
A sum_of(const A* x, int64_t count) {
  return simd_sum<A, kPartials<A>>(count, [=](auto i) { return load(x, i); });
}

template <class A>
A product_of(const A* x, const A* y, int64_t count) {
  return simd_sum<A, kPartials<A>>(count, [=](auto i) { return load(x, i) * load(y, i); });
}

template <class A>
A log_sum_exp(const A* x, int64_t count) {
  const A max = simd_max(count, -kInfinity<A>, [=](auto i) { return load(x, i); });
  const auto term = [=](auto i) { return exp<A>(load(x, i) - max); };
  return max + std::log(simd_sum<A, kPartials<A>>(count, term));
}

/// The highest of what was offered so far, and their numbers: the highest first. Offered in the
/// order of their numbers, so that of equals the lower one stays ahead. NaN counts as -infinity.
template <class A>
class Highest {
 public:
  Highest(A* values, int32_t* numbers, int64_t wanted)
      : values_(values), numbers_(numbers), wanted_(wanted) {}

  void offer(A value, int64_t number) {
    if (!(value == value)) value = -kInfinity<A>;
    if (count_ == wanted_ && !(value > values_[wanted_ - 1])) return;
    int64_t at = count_ < wanted_ ? count_++ : wanted_ - 1;
    for (; at > 0 && value > values_[at - 1]; --at) {
      values_[at] = values_[at - 1];
      numbers_[at] = numbers_[at - 1];
    }
    values_[at] = value;
    numbers_[at] = static_cast<int32_t>(number);
  }
  A sum() const {
    A sum = 0;
    for (int64_t i = 0; i < count_; ++i) sum += values_[i];
    return sum;
  }
  bool has(int64_t number) const {
    return std::find(numbers_, numbers_ + count_, number) != numbers_ + count_;
  }

 private:
  A* values_;
  int32_t* numbers_;
  int64_t wanted_, count_ = 0;
};

/// What a token chooses by, and among which experts.
template <class A>
struct Choice {
  const A* bias;  ///< nullptr: 0
  int64_t experts, groups, allowed, k;

  A priority(const A* scores, int64_t expert) const {
    return bias == nullptr ? scores[expert] : scores[expert] + bias[expert];
  }
  /// Numbers of either kind that choose() works with.
  int64_t workspace() const { return round_up(k + allowed, 64); }  // threads share no cache line

  /// choices [k] from scores [experts].
  void choose(int32_t* choices, const A* scores, A* values, int32_t* numbers) const {
    const int64_t size = experts / groups;
    Highest<A> best_groups(values + k, numbers + k, allowed);
    for (int64_t group = 0; groups > 1 && group < groups; ++group) {
      Highest<A> best(values, numbers, (k + allowed - 1) / allowed);
      for (int64_t e = group * size; e < (group + 1) * size; ++e) {
        best.offer(priority(scores, e), e);
      }
      best_groups.offer(best.sum(), group);
    }
    Highest<A> best(values, choices, k);
    for (int64_t group = 0; group < groups; ++group) {
      if (groups > 1 && !best_groups.has(group)) continue;
      for (int64_t e = group * size; e < (group + 1) * size; ++e) {
        best.offer(priority(scores, e), e);
      }
    }
  }
};

/// The sum of a token's chosen scores, where gates are shares of it, else 1.
template <class A>
A divisor_of_gates(const A* scores, const int32_t* choices, int64_t k, bool normalised) {
  if (!normalised) return 1;
  A sum = 0;
  for (int64_t j = 0; j < k; ++j) sum += scores[choices[j]];
  return sum;
}

/// 1 / x; of 0, where everything that it scales is 0 as well, 0.
template <class A>
A inverse_of(A x) {
  return x == 0 ? 0 : 1 / x;
}

}  // namespace

void CpuBackend::router_scores(Tensor scores, const Tensor& logits, RouterScore kind) {
  dispatch_acc(scores.dtype(), [&]<class A>(A) {
    const int64_t E = scores.size(1);
    A* out = scores.data<A>();
    const A* in = logits.data<A>();
    parallel_for(scores.size(0), 4 * E, [=](int64_t t) {
      A* y = out + t * E;
      const A* x = in + t * E;
      if (kind == RouterScore::sigmoid) {
        simd_map(y, E, [=](auto e) { return sigmoid<A>(load(x, e)); });
        return;
      }
      const A max = simd_max(E, -kInfinity<A>, [=](auto e) { return load(x, e); });
      simd_map(y, E, [=](auto e) { return exp<A>(load(x, e) - max); });
      const A inverse = 1 / sum_of(y, E);
      simd_map(y, E, [=](auto e) { return load(y, e) * inverse; });
    });
  });
}

// Differentiates router_scores' `sigmoid<A>(load(x, e))`, or softmax's `load(y, e) * inverse`.
void CpuBackend::router_scores_backward(Tensor dlogits, const Tensor& dscores, const Tensor& scores,
                                        RouterScore kind) {
  dispatch_acc(scores.dtype(), [&]<class A>(A) {
    const int64_t E = scores.size(1);
    A* out = dlogits.data<A>();
    const A *grad = dscores.data<A>(), *in = scores.data<A>();
    parallel_for(scores.size(0), 2 * E, [=](int64_t t) {
      A* dx = out + t * E;
      const A *dy = grad + t * E, *y = in + t * E;
      if (kind == RouterScore::sigmoid) {
        simd_map(dx, E, [=](auto e) { return load(dy, e) * load(y, e) * (1 - load(y, e)); });
        return;
      }
      const A mean = product_of(dy, y, E);
      simd_map(dx, E, [=](auto e) { return load(y, e) * (load(dy, e) - mean); });
    });
  });
}

void CpuBackend::choose_experts(Tensor choices, const Tensor& scores, const Tensor& bias,
                                int64_t groups, int64_t allowed) {
  dispatch_acc(scores.dtype(), [&]<class A>(A) {
    const int64_t E = scores.size(1), k = choices.size(1);
    const Choice<A> choice{bias.defined() ? bias.data<A>() : nullptr, E, groups, allowed, k};
    int32_t* out = choices.data<int32_t>();
    const A* in = scores.data<A>();
    const PerThread<A> values(choice.workspace());
    const PerThread<int32_t> numbers(choice.workspace());
    parallel_for(scores.size(0), 2 * E, [=, &values, &numbers](int64_t t) {
      choice.choose(out + t * k, in + t * E, values.mine(), numbers.mine());
    });
  });
}

void CpuBackend::count_choices(Tensor counts, const Tensor& choices) {
  const int64_t runs = counts.size(0), E = counts.size(1), of_run = choices.numel() / runs;
  int32_t* out = counts.data<int32_t>();
  const int32_t* in = choices.data<int32_t>();
  parallel_for(runs, of_run, [=](int64_t run) {
    int32_t* count = out + run * E;
    std::fill_n(count, E, 0);
    for (int64_t i = run * of_run; i < (run + 1) * of_run; ++i) {
      if (in[i] >= 0) ++count[in[i]];
    }
  });
}

void CpuBackend::drop_choices(Tensor choices, const Tensor& before, int64_t capacity) {
  const int64_t runs = before.size(0), E = before.size(1), of_run = choices.numel() / runs;
  const Tensor counted = workspace(before.shape(), DType::i32);
  copy(counted, before);
  int32_t *chosen = choices.data<int32_t>(), *counts = counted.data<int32_t>();
  parallel_for(runs, of_run, [=](int64_t run) {
    int32_t* count = counts + run * E;
    for (int64_t i = run * of_run; i < (run + 1) * of_run; ++i) {
      if (chosen[i] >= 0 && count[chosen[i]]++ >= capacity) chosen[i] = -1;
    }
  });
}

void CpuBackend::gates_forward(Tensor gates, const Tensor& scores, const Tensor& choices,
                               bool normalised, double scale) {
  dispatch_acc(scores.dtype(), [&]<class A>(A) {
    const int64_t E = scores.size(1), k = choices.size(1);
    A* out = gates.data<A>();
    const A* in = scores.data<A>();
    const int32_t* chosen = choices.data<int32_t>();
    parallel_for(scores.size(0), 4 * k, [=](int64_t t) {
      const A* score = in + t * E;
      const int32_t* choice = chosen + t * k;
      const A factor = A(scale) * inverse_of(divisor_of_gates(score, choice, k, normalised));
      for (int64_t j = 0; j < k; ++j) out[t * k + j] = score[choice[j]] * factor;
    });
  });
}

// Differentiates gates_forward's `score[choice[j]] * factor`; the factor holds all k scores.
void CpuBackend::gates_backward(Tensor dscores, const Tensor& dgates, const Tensor& gates,
                                const Tensor& scores, const Tensor& choices, bool normalised,
                                double scale) {
  dispatch_acc(scores.dtype(), [&]<class A>(A) {
    const int64_t E = scores.size(1), k = choices.size(1);
    A* out = dscores.data<A>();
    const A *grad = dgates.data<A>(), *gate = gates.data<A>(), *in = scores.data<A>();
    const int32_t* chosen = choices.data<int32_t>();
    parallel_for(scores.size(0), 6 * k, [=](int64_t t) {
      const int32_t* choice = chosen + t * k;
      const A inverse = inverse_of(divisor_of_gates(in + t * E, choice, k, normalised));
      A along = 0;  // a larger score makes every gate of the token smaller
      for (int64_t j = 0; normalised && j < k; ++j) along += grad[t * k + j] * gate[t * k + j];
      for (int64_t j = 0; j < k; ++j) {
        out[t * E + choice[j]] += (A(scale) * grad[t * k + j] - along) * inverse;
      }
    });
  });
}

void CpuBackend::assign_slots(Tensor slots, const Tensor& choices,
                              std::span<const int64_t> counts) {
  std::vector<int64_t> next(counts.size());  // the slot of each expert's next row
  for (size_t e = 1; e < next.size(); ++e) next[e] = next[e - 1] + counts[e - 1];
  int32_t* out = slots.data<int32_t>();
  const int32_t* chosen = choices.data<int32_t>();
  for (int64_t i = 0; i < choices.numel(); ++i) {
    out[i] = chosen[i] < 0 ? -1 : static_cast<int32_t>(next[chosen[i]]++);
  }
}

void CpuBackend::permute(Tensor rows, const Tensor& x, const Tensor& slots) {
  const int64_t k = slots.size(1), row_bytes = x.size(1) * bytes_of(x.dtype());
  char* out = static_cast<char*>(rows.address());
  const char* in = static_cast<const char*>(x.address());
  const int32_t* slot = slots.data<int32_t>();
  parallel_for(x.size(0), k * x.size(1), [=](int64_t t) {
    for (int64_t i = t * k; i < (t + 1) * k; ++i) {
      if (slot[i] >= 0) std::memcpy(out + slot[i] * row_bytes, in + t * row_bytes, row_bytes);
    }
  });
}

void CpuBackend::unpermute(Tensor y, const Tensor& rows, const Tensor& slots, const Tensor& gates,
                           const Tensor& first) {
  dispatch(y.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t H = y.size(1), k = slots.size(1);
    T* out = y.data<T>();
    const T* in = rows.data<T>();
    const T* begin = first.defined() ? first.data<T>() : nullptr;
    const int32_t* slot = slots.data<int32_t>();
    const A* gate = gates.defined() ? gates.data<A>() : nullptr;
    parallel_for(y.size(0), k * H, [=](int64_t t) {
      T* y_row = out + t * H;
      const auto element = [=](auto h) {
        auto sum = begin == nullptr ? decltype(load(in, h)){} : load(begin + t * H, h);
        for (int64_t i = t * k; i < (t + 1) * k; ++i) {
          if (slot[i] < 0) continue;
          sum = sum + load(in + slot[i] * H, h) * (gate == nullptr ? A{1} : gate[i]);
        }
        return sum;
      };
      simd_map(y_row, H, element);
    });
  });
}

// Differentiates unpermute's `load(in + slot[i] * H, h) * (gate == nullptr ? A{1} : gate[i])`, by
// both factors.
void CpuBackend::unpermute_backward(Tensor drows, Tensor dgates, const Tensor& dy,
                                    const Tensor& rows, const Tensor& slots, const Tensor& gates) {
  dispatch(dy.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t H = dy.size(1), k = slots.size(1);
    T* out = drows.data<T>();
    A* dgate = dgates.data<A>();
    const T *grad = dy.data<T>(), *in = rows.data<T>();
    const int32_t* slot = slots.data<int32_t>();
    const A* gate = gates.data<A>();
    parallel_for(dy.size(0), 3 * k * H, [=](int64_t t) {
      const T* dy_row = grad + t * H;
      for (int64_t i = t * k; i < (t + 1) * k; ++i) {
        dgate[i] = 0;
        if (slot[i] < 0) continue;
        const T* row = in + slot[i] * H;
        const auto product = [=](auto h) { return load(dy_row, h) * load(row, h); };
        dgate[i] = simd_sum<A, kPartials<T>>(H, product);
        const A factor = gate[i];
        simd_map(out + slot[i] * H, H, [=](auto h) { return load(dy_row, h) * factor; });
      }
    });
  });
}

void CpuBackend::balance_loss_forward(Tensor loss, const Tensor& scores, const Tensor& load,
                                      double scale, bool normalised) {
  dispatch_acc(scores.dtype(), [&]<class A>(A) {
    const int64_t T = scores.size(0), E = scores.size(1), of_run = T / load.size(0);
    const A *in = scores.data<A>(), *loads = load.data<A>();
    *loss.data<double>() += scale * sum_over_rows(T, 2 * E, [=](int64_t t) {
                              const A* score = in + t * E;
                              const A sum = product_of(score, loads + t / of_run * E, E);
                              return normalised ? sum * inverse_of(sum_of(score, E)) : sum;
                            });
  });
}

// Differentiates balance_loss_forward's `normalised ? sum * inverse_of(sum_of(score, E)) : sum`.
void CpuBackend::balance_loss_backward(Tensor dscores, const Tensor& scores, const Tensor& load,
                                       double scale, bool normalised) {
  dispatch_acc(scores.dtype(), [&]<class A>(A) {
    const int64_t T = scores.size(0), E = scores.size(1), of_run = T / load.size(0);
    A* out = dscores.data<A>();
    const A *in = scores.data<A>(), *loads = load.data<A>();
    parallel_for(T, 3 * E, [=](int64_t t) {
      const A *score = in + t * E, *of_expert = loads + t / of_run * E;
      A* grad = out + t * E;
      const A inverse = normalised ? inverse_of(sum_of(score, E)) : A{1};
      // Shares add up to 1: what all loads have in common changes nothing.
      const A mean = normalised ? product_of(score, of_expert, E) * inverse : A{0};
      const A factor = A(scale) * inverse;
      simd_map(grad, E, [=](auto e) {
        return cpu::load(grad, e) + (cpu::load(of_expert, e) - mean) * factor;
      });
    });
  });
}

void CpuBackend::z_loss_forward(Tensor loss, const Tensor& logits, double scale) {
  dispatch_acc(logits.dtype(), [&]<class A>(A) {
    const int64_t T = logits.size(0), E = logits.size(1);
    const A* in = logits.data<A>();
    *loss.data<double>() += scale * sum_over_rows(T, 2 * E, [=](int64_t t) {
                              const A z = log_sum_exp(in + t * E, E);
                              return z * z;
                            });
  });
}

// Differentiates z_loss_forward's `z * z`, where z is `log_sum_exp(in + t * E, E)`.
void CpuBackend::z_loss_backward(Tensor dlogits, const Tensor& logits, double scale) {
  dispatch_acc(logits.dtype(), [&]<class A>(A) {
    const int64_t E = logits.size(1);
    A* out = dlogits.data<A>();
    const A* in = logits.data<A>();
    parallel_for(logits.size(0), 4 * E, [=](int64_t t) {
      const A* x = in + t * E;
      A* dx = out + t * E;
      const A z = log_sum_exp(x, E), factor = A(2 * scale) * z;
      simd_map(dx, E, [=](auto e) { return load(dx, e) + exp<A>(load(x, e) - z) * factor; });
    });
  });
}

void CpuBackend::router_entropy(Tensor sum, const Tensor& scores) {
  dispatch_acc(scores.dtype(), [&]<class A>(A) {
    const int64_t T = scores.size(0), E = scores.size(1);
    const A* in = scores.data<A>();
    *sum.data<double>() += sum_over_rows(T, 16 * E, [=](int64_t t) {
      const A* score = in + t * E;
      const A inverse = inverse_of(sum_of(score, E));
      A entropy = 0;
      for (int64_t e = 0; e < E; ++e) {
        const A p = score[e] * inverse;
        if (p != 0) entropy -= p * std::log(p);  // NaN reaches the sum
      }
      return entropy;
    });
  });
}

void CpuBackend::balance_bias(Tensor bias, const Tensor& load, double rate) {
  dispatch_acc(bias.dtype(), [&]<class A>(A) {
    const int64_t E = bias.numel();
    A* out = bias.data<A>();
    const A* in = load.data<A>();
    double sum = 0;
    for (int64_t e = 0; e < E; ++e) sum += static_cast<double>(in[e]);
    const double mean = sum / static_cast<double>(E);
    for (int64_t e = 0; e < E; ++e) {
      const double of_expert = static_cast<double>(in[e]);
      if (of_expert < mean) out[e] += A(rate);
      if (of_expert > mean) out[e] -= A(rate);
    }
  });
}

}  // namespace usp::cpu
