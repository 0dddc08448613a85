#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace usp::cpu {

void CpuBackend::sum_squares(Tensor sum, std::span<const Tensor> xs, bool accumulate) {
  const auto squares_of = []<class T>(const Tensor& x, T) {
    const T* in = x.data<T>();
    return sum_over_blocks(x.numel(), [=](int64_t begin, int64_t end) {
      const auto square = [x = in + begin](int64_t i) {
        const auto element = static_cast<double>(load(x[i]));
        return element * element;
      };
      if constexpr (!std::is_same_v<T, double>) {
        return simd_sum<double, kStride>(end - begin, square);
      }
      double squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < end - begin; ++i) squares += square(i);
      return squares;
    });
  };
  double& total = *sum.data<double>();
  if (!accumulate) total = 0;
  for (const Tensor& x : xs) {
    dispatch(x.dtype(), [&](auto element) { total += squares_of(x, element); });
  }
}

void CpuBackend::clip_coefficient(Tensor coefficient, Tensor norm, const Tensor& sums,
                                  double max_norm) {
  double sum = 0;
  for (int64_t i = 0; i < sums.numel(); ++i) sum += sums.data<double>()[i];
  const double length = std::sqrt(sum);
  double factor = 1;
  if (max_norm > 0 && length > max_norm) factor = max_norm / length;
  if (!std::isfinite(length)) factor = std::numeric_limits<double>::quiet_NaN();
  *norm.data<double>() = length;
  *coefficient.data<double>() = factor;
}

void CpuBackend::adamw(std::span<const AdamWRange> ranges, const Tensor& coefficient,
                       const AdamWSettings& settings) {
  const double factor = *coefficient.data<double>();
  if (std::isnan(factor)) return;
  const auto update = [&]<class T, class G>(T, G) {
    using A = accumulate_t<T>;
    const double t = static_cast<double>(settings.step);
    const A clip = A(factor), eps = A(settings.eps);
    const A beta1 = A(settings.beta1), beta2 = A(settings.beta2);
    const A fresh1 = A(1 - settings.beta1), fresh2 = A(1 - settings.beta2);
    // The moments start at 0; dividing by 1 - beta^t makes them weighted means of the gradients.
    const A unbias1 = A(1 / (1 - std::pow(settings.beta1, t)));
    const A unbias2 = A(1 / (1 - std::pow(settings.beta2, t)));
    const A lr = A(settings.lr);
    const double rate = settings.lr;
    std::vector<int64_t> first_blocks;  // of each range, where all blocks of all are in one row
    int64_t blocks = 0;
    for (const AdamWRange& range : ranges) {
      first_blocks.push_back(blocks);
      blocks += (range.value.numel() + kBlock - 1) / kBlock;
    }
    const std::span<const int64_t> first(first_blocks);
    parallel_for(blocks, kBlock, [=](int64_t block) {
      const auto after = std::upper_bound(first.begin(), first.end(), block);
      const int64_t at = after - first.begin() - 1;  // the last that begins here: earlier are empty
      const AdamWRange& range = ranges[at];
      const int64_t begin = (block - first[at]) * kBlock;
      const int64_t end = std::min(range.value.numel(), begin + kBlock);
      T* weight = range.value.data<T>();
      A *w = range.master.data<A>(), *mean = range.m.data<A>(), *variance = range.v.data<A>();
      const G* gradient = range.grad.data<G>();
      const A keep = A(1 - rate * range.weight_decay);
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A g = load(gradient[i]) * clip;
        mean[i] = beta1 * mean[i] + fresh1 * g;
        variance[i] = beta2 * variance[i] + fresh2 * g * g;
        const A step = mean[i] * unbias1 / (std::sqrt(variance[i] * unbias2) + eps);
        const A updated = w[i] * keep - lr * step;
        w[i] = updated;
        store(weight[i], updated);
      }
    });
  };
  const DType dtype = ranges[0].value.dtype();
  dispatch(dtype, [&]<class T>(T weight) {
    ranges[0].grad.dtype() == dtype ? update(weight, weight) : update(weight, accumulate_t<T>{});
  });
}

}  // namespace usp::cpu
