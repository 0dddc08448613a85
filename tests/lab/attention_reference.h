#pragma once

#include "lab/attention_case.h"
#include "tensor/ops.h"

namespace usp::lab {

/// The same numbers in f64, for the CPU's op.
struct Reference {
  Tensor q, k, v, out, lse;
  double scale;
  Positions queries, keys;

  template <class T>
  explicit Reference(const Attended<T>& attended) : scale(attended.problem.scale) {
    const attention::Shape& x = attended.problem;
    q = Tensor::from_host(attended.q(), {x.samples, x.queries, x.heads, x.width}, DType::f64);
    k = Tensor::from_host(attended.k(), {x.samples, x.keys, x.kv_heads, x.width}, DType::f64);
    v = Tensor::from_host(attended.v(), k.shape(), DType::f64);
    out = Tensor::empty(q.shape(), DType::f64);
    lse = Tensor::empty({x.samples, x.heads, x.queries}, DType::f64);
    // Keys are at positions behind 0, so that queries before them have one, too.
    const int64_t first = x.causal ? std::max(0, -x.offset) : 0;
    queries = {x.causal ? first + x.offset : x.keys, x.queries};
    keys = {first, x.keys};
    forward();
  }
  void forward() { ops::attention_forward(out, lse, {}, q, k, v, scale, queries, keys); }
};

/// As a message has it.
inline std::string text_of(const attention::Shape& x) {
  return fmt::format("{} x {} x {}, heads {}/{} of {}{}{}", x.samples, x.queries, x.keys, x.heads,
                     x.kv_heads, x.width, x.causal ? ", causal from " : "",
                     x.causal ? std::to_string(x.offset) : "");
}

}  // namespace usp::lab
