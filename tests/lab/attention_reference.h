#pragma once

#include "lab/attention_case.h"
#include "tensor/ops.h"

namespace usp::lab {

/// The same numbers in f64, for the CPU's op, whose values are as wide as keys: with zeros behind
/// those of the rung.
struct Reference {
  Tensor q, k, v, lse;
  Tensor out;  ///< [samples, queries, heads, value_width()]
  double scale;
  Positions queries, keys;
  Documents documents;

  template <class T>
  explicit Reference(const Attended<T>& attended) : scale(attended.problem.scale) {
    const attention::Shape& x = attended.on_host;
    q = Tensor::from_host(attended.q(), {x.samples, x.queries, x.heads, x.width}, DType::f64);
    k = Tensor::from_host(attended.k(), {x.samples, x.keys, x.kv_heads, x.width}, DType::f64);
    v = Tensor::zeros(k.shape(), DType::f64);
    ops::copy(v.narrow(3, 0, x.value_width()),
              Tensor::from_host(attended.v(), {x.samples, x.keys, x.kv_heads, x.value_width()},
                                DType::f64));
    wide_out_ = Tensor::empty(q.shape(), DType::f64);
    out = wide_out_.narrow(3, 0, x.value_width());
    lse = Tensor::empty({x.samples, x.heads, x.queries}, DType::f64);
    // All are moved, so that queries before the first key have a position, too.
    const int moved = std::max(0, -x.query_at.begin);
    queries = positions_of(x.query_at, x.queries, x.causal ? moved : x.keys);
    keys = positions_of(x.key_at, x.keys, moved);
    if (x.begins != nullptr) {
      documents = Documents({x.begins, x.begins + size_t{1} * x.samples * x.queries},
                            {x.samples, x.queries});
    }
    forward();
  }
  void forward() {
    ops::attention_forward(wide_out_, lse, {}, q, k, v, scale, queries, keys, documents);
  }
  /// What naive attention makes of them in bf16, as out.
  Tensor naive() const {
    const auto rounded = [](const Tensor& x) {
      const Tensor y = Tensor::empty(x.shape(), DType::bf16);
      ops::copy(y, x);
      return y;
    };
    const Tensor y = Tensor::empty(q.shape(), DType::bf16);
    const Tensor sums = Tensor::empty(lse.shape(), DType::f32);
    const Tensor probs = Tensor::empty({q.size(0), q.size(2), q.size(1), k.size(1)}, DType::bf16);
    ops::attention_forward(y, sums, probs, rounded(q), rounded(k), rounded(v), scale, queries, keys,
                           documents);
    return y.narrow(3, 0, out.size(3));
  }

 private:
  Tensor wide_out_;

  static Positions positions_of(const attention::Ranges& at, int count, int moved) {
    const int first = std::min(count, at.length);
    return {at.begin + moved, first, at.second + moved, count - first};
  }
};

/// As a message has it.
inline std::string text_of(const attention::Shape& x) {
  const auto text = [](const attention::Ranges& at, int count) {
    std::string ranges = std::to_string(at.begin);
    if (at.length < count) ranges += fmt::format(" ({}), {}", at.length, at.second);
    return ranges;
  };
  return fmt::format(
      "{} x {} x {}, heads {}/{} of {}{}", x.samples, x.queries, x.keys, x.heads, x.kv_heads,
      x.width,
      x.causal ? fmt::format(", causal from {}, keys from {}{}", text(x.query_at, x.queries),
                             text(x.key_at, x.keys), x.begins == nullptr ? "" : ", documents")
               : "");
}

}  // namespace usp::lab
