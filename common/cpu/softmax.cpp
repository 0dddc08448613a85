#include <algorithm>
#include <cmath>

#include "cpu/causal_mask.h"
#include "cpu/cpu_backend.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace usp::cpu {

namespace {

/// Writes the softmax of scale * x, restricted to the keys in the window, to y [count] (which
/// may be x), zeros elsewhere; returns the log of the sum. No such key lies at `seen` or
/// beyond. A row that sees no key: zeros and -inf. terms [seen] is a workspace.
template <class T>
accumulate_t<T> causal_softmax_row(T* y, const T* x, int64_t count, accumulate_t<T> scale,
                                   const int32_t* keys, Window window, int64_t seen,
                                   accumulate_t<T>* terms) {
  using A = accumulate_t<T>;
  const auto score = [=](auto i) {
    const auto value = hide_unseen(load(x, i) * scale, keys, i, window);
    store(terms, i, value);
    return value;
  };
  const A max = simd_max(seen, -kInfinity<A>, score);
  const A shift = max == -kInfinity<A> ? 0 : max;  // -inf - -inf would be NaN
  const auto term = [=](auto i) {
    const auto e = exp<T>(load(terms, i) - shift);
    store(terms, i, e);
    return e;
  };
  const A sum = simd_sum<A, kPartials<T>>(seen, term, x + count, y + count);
  const A inverse = sum == 0 ? 0 : 1 / sum;
  simd_map(y, seen, [=](auto i) { return load(terms, i) * inverse; });
  const auto zero = [=](auto i) { return decltype(load(y, i)){}; };
  simd_map(y + seen, count - seen, zero, y + seen + count);
  return max + std::log(sum);
}

}  // namespace

void CpuBackend::causal_softmax_forward(Tensor probs, Tensor lse, const Tensor& scores,
                                        double scale, const Positions& queries,
                                        const Positions& keys, const Tensor& begins) {
  const CausalMask mask(queries, keys, begins);
  dispatch(probs.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t N = probs.size(1), S = probs.size(2), K = probs.size(3);
    T* out = probs.data<T>();
    A* log_sums = lse.data<A>();
    const T* in = scores.data<T>();
    const int32_t* key = mask.keys();
    const PerThread<A> terms(K);
    parallel_for(lse.numel(), 4 * K, [=, &mask, &terms](int64_t row) {
      const Window window = mask.window(row / (N * S), row % S);
      log_sums[row] = causal_softmax_row(out + row * K, in + row * K, K, A(scale), key, window,
                                         std::min(K, mask.num_seen(window)), terms.mine());
    });
  });
}

// Differentiates causal_softmax_row's `load(terms, i) * inverse`.
void CpuBackend::causal_softmax_backward(Tensor dscores, const Tensor& dprobs, const Tensor& probs,
                                         const Tensor& delta, double scale) {
  dispatch(probs.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t K = probs.size(3);
    T* out = dscores.data<T>();
    const T *grad = dprobs.data<T>(), *p = probs.data<T>();
    const A *dot = delta.data<A>(), factor = A(scale);
    parallel_for(delta.numel(), K, [=](int64_t row) {
      const T *grad_row = grad + row * K, *p_row = p + row * K;
      T* out_row = out + row * K;
      const A delta_of_row = dot[row];
      const auto element = [=](auto i) {
        return load(p_row, i) * (load(grad_row, i) - delta_of_row) * factor;
      };
      simd_map(out_row, K, element, grad_row + K, p_row + K, out_row + K);
    });
  });
}

void CpuBackend::attention_rescale(Tensor probs, const Tensor& part_lse, const Tensor& lse) {
  dispatch(probs.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t K = probs.size(3);
    T* p = probs.data<T>();
    const A *of_part = part_lse.data<A>(), *of_all = lse.data<A>();
    parallel_for(lse.numel(), K, [=](int64_t row) {
      // Where all keys are unseen, too, -inf - -inf would be NaN.
      const A factor = of_part[row] == -kInfinity<A> ? 0 : std::exp(of_part[row] - of_all[row]);
      T* p_row = p + row * K;
      simd_map(
          p_row, K, [=](auto i) { return load(p_row, i) * factor; }, p_row + K);
    });
  });
}

void CpuBackend::cross_entropy_forward(Tensor row_max, Tensor row_sum, Tensor target_logit,
                                       const Tensor& logits, const Tensor& targets,
                                       int64_t vocab_offset) {
  dispatch(logits.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t V = logits.size(1);
    A *maxima = row_max.data<A>(), *sums = row_sum.data<A>(), *picked = target_logit.data<A>();
    const T* in = logits.data<T>();
    const int32_t* target = targets.data<int32_t>();
    parallel_for(targets.numel(), 2 * V, [=](int64_t row) {
      const T* x = in + row * V;
      const A max = simd_max(V, -kInfinity<A>, [=](auto i) { return load(x, i); });
      const auto term = [=](auto i) { return exp<T>(load(x, i) - max); };
      const A sum = simd_sum<A, kPartials<T>>(V, term, x + V);
      const int64_t index = target[row] - vocab_offset;
      maxima[row] = max;
      sums[row] = sum;
      picked[row] = index >= 0 && index < V ? load(x[index]) : A{0};
    });
  });
}

void CpuBackend::cross_entropy_rescale(Tensor row_sum, const Tensor& row_max, const Tensor& max) {
  dispatch(row_sum.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    A* sums = row_sum.data<A>();
    const A *from = row_max.data<A>(), *to = max.data<A>();
    parallel_for(row_sum.numel(), 1, [=](int64_t row) {
      // A shard of none but impossible tokens adds nothing, whatever the others hold.
      if (sums[row] != 0) sums[row] *= std::exp(from[row] - to[row]);
    });
  });
}

void CpuBackend::cross_entropy_loss(Tensor loss, Tensor lse, const Tensor& row_max,
                                    const Tensor& row_sum, const Tensor& target_logit,
                                    double scale) {
  dispatch(lse.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    A* log_sums = lse.data<A>();
    const A *maxima = row_max.data<A>(), *sums = row_sum.data<A>();
    const A* picked = target_logit.data<A>();
    *loss.data<double>() +=
        scale * sum_over_blocks(lse.numel(), [=](int64_t begin, int64_t end) {
          double sum = 0;
          for (int64_t row = begin; row < end; ++row) {
            log_sums[row] = maxima[row] + std::log(sums[row]);
            sum += static_cast<double>(log_sums[row]) - static_cast<double>(picked[row]);
          }
          return sum;
        });
  });
}

// Differentiates cross_entropy_loss's `log_sums[row] = maxima[row] + std::log(sums[row])`, and the
// target's logit that is subtracted there.
void CpuBackend::cross_entropy_backward(Tensor dlogits, const Tensor& logits, const Tensor& targets,
                                        const Tensor& lse, int64_t vocab_offset, double scale) {
  dispatch(logits.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t V = logits.size(1);
    T* out = dlogits.data<T>();
    const T* in = logits.data<T>();
    const int32_t* target = targets.data<int32_t>();
    const A *log_sums = lse.data<A>(), factor = A(scale);
    parallel_for(targets.numel(), 2 * V, [=](int64_t row) {
      const T* x = in + row * V;
      T* dx = out + row * V;
      const int64_t index = target[row] - vocab_offset;
      const bool here = index >= 0 && index < V;
      const A at_target = here ? exp<T>(load(x[index]) - log_sums[row]) : A{0};
      const A log_sum = log_sums[row];
      const auto element = [=](auto i) { return factor * exp<T>(load(x, i) - log_sum); };
      simd_map(dx, V, element, x + V, dx + V);
      if (here) store(dx[index], factor * (at_target - 1));
    });
  });
}

}  // namespace usp::cpu
