#pragma once

#include <numeric>

#include "lab/attention_reference.h"

namespace usp::lab {

/// Gradients of queries, keys and values.
struct Found {
  std::vector<double> dq, dk, dv;

  bool operator==(const Found&) const = default;
};

/// How far apart they are, as a share of the second one's length.
inline double distance(const std::vector<double>& x, const std::vector<double>& y) {
  double difference = 0, length = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    difference += (x[i] - y[i]) * (x[i] - y[i]);
    length += y[i] * y[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / length);
}

/// Gradients of a problem that forward() has run, in f64 but for what every rung rounds to bf16:
/// outputs, which delta comes from; weights and scores' gradients, before products sum them; sums.
/// `exact` has the problem's numbers and lse.
inline Found rounded_gradients(const Differentiated& problem, const Reference& exact) {
  const auto rounded = [](double x) -> double {
    return static_cast<float>(bf16(static_cast<float>(x)));
  };
  const auto dot = [](const double* x, const double* y, int n) {
    return std::transform_reduce(x, x + n, y, 0.0);
  };
  const auto add = [](double* sum, double factor, const double* x, int n) {
    for (int i = 0; i < n; ++i) sum[i] += factor * x[i];
  };
  const Shape& shape = problem.attended().on_host;
  const int width = shape.width, value_width = shape.value_width();
  const std::vector<double> q = problem.attended().q(), k = problem.attended().k(),
                            v = problem.attended().v(), out = problem.attended().out(),
                            dout = problem.dout(), lse = exact.lse.items();
  Found sums{std::vector<double>(q.size()), std::vector<double>(k.size()),
             std::vector<double>(v.size())};
  for (int i = 0; i < shape.samples * shape.queries * shape.heads; ++i) {
    const int head = i % shape.heads, query = i / shape.heads % shape.queries;
    const int sample = i / shape.heads / shape.queries;
    const attention::Stretch seen = shape.seen_by(sample, query);
    const size_t of_q = size_t{1} * i * width, of_out = size_t{1} * i * value_width;
    const double delta = dot(&dout[of_out], &out[of_out], value_width);
    const double own_lse = lse[(size_t{1} * sample * shape.heads + head) * shape.queries + query];
    for (int key = seen.from; key < seen.to; ++key) {
      const size_t row = (size_t{1} * sample * shape.keys + key) * shape.kv_heads +
                         head / (shape.heads / shape.kv_heads);
      const size_t of_k = row * width, of_v = row * value_width;
      const double weight = std::exp(exact.scale * dot(&q[of_q], &k[of_k], width) - own_lse);
      const double dweight = dot(&dout[of_out], &v[of_v], value_width);
      const double dscore = exact.scale * rounded(weight * (dweight - delta));
      add(&sums.dv[of_v], rounded(weight), &dout[of_out], value_width);
      add(&sums.dk[of_k], dscore, &q[of_q], width);
      add(&sums.dq[of_q], dscore, &k[of_k], width);
    }
  }
  for (std::vector<double>* all : {&sums.dq, &sums.dk, &sums.dv}) {
    for (double& x : *all) x = rounded(x);
  }
  return sums;
}

}  // namespace usp::lab
