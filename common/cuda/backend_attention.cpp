#include "cuda/backend.h"
#include "cuda/operands.h"

namespace usp::cuda {

namespace {

/// The [rows, channels] matrices of heads first, first + every, ... of one sample of x [B, S, N,
/// D].
Matrices heads_of(const Tensor& x, int64_t sample, int64_t first, int64_t every) {
  const Tensor head = x.narrow(0, sample, 1).narrow(2, first, 1).view({x.size(1), x.size(3)});
  return {head, x.size(2) / every, every * x.stride(2)};
}

/// The [S, K] matrices of the same heads of x [B, N, S, K].
Matrices scores_of(const Tensor& x, int64_t sample, int64_t first, int64_t every) {
  const Tensor head = x.narrow(0, sample, 1).narrow(1, first, 1).view({x.size(2), x.size(3)});
  return {head, x.size(1) / every, every * x.stride(1)};
}

Matrices transposed(const Matrices& x) { return {x.first.transposed(), x.count, x.batch_stride}; }

/// body(b, n) for every sample b and every place n of a query head in its group. The n-th heads of
/// all groups make one batch: each reads a kv head of its own, so that no two add to one gradient.
template <class Body>
void for_each_batch(const Tensor& q, const Tensor& k, const Body& body) {
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t n = 0; n < q.size(2) / k.size(2); ++n) body(b, n);
  }
}

}  // namespace

void CudaBackend::rope(Tensor x, const Tensor& cos, const Tensor& sin, const Positions& positions,
                       bool inverse) {
  with_type(x.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    Rope<T>::run(stream_, heads<T>(x), data<A>(cos), data<A>(sin), positions, inverse, x.size(0),
                 x.size(1), x.size(2), x.size(3));
  });
}

void CudaBackend::causal_softmax_forward(Tensor probs, Tensor lse, const Tensor& scores,
                                         double scale, const Positions& queries,
                                         const Positions& keys, const Tensor& begins) {
  with_type(probs.dtype(), [&]<class T>(T) {
    CausalSoftmax<T>::forward(stream_, data<T>(probs), data<accumulate_t<T>>(lse), data<T>(scores),
                              scale, queries, keys, data<const int32_t>(begins), lse.numel(),
                              probs.size(1));
  });
}

void CudaBackend::causal_softmax_backward(Tensor dscores, const Tensor& dprobs, const Tensor& probs,
                                          const Tensor& delta, double scale) {
  with_type(probs.dtype(), [&]<class T>(T) {
    CausalSoftmax<T>::backward(stream_, data<T>(dscores), data<T>(dprobs), data<T>(probs),
                               data<accumulate_t<T>>(delta), scale, delta.numel(), probs.size(3));
  });
}

namespace {

template <class T>
AttentionProblem<T> attention_problem(const Tensor& q, const Tensor& k, const Tensor& v,
                                      double scale, const Positions& queries, const Positions& keys,
                                      const Tensor& begins, int64_t value_dim) {
  AttentionProblem<T> problem{q.size(0),         q.size(1), q.size(2),         q.size(3),
                              k.size(1),         k.size(2), heads<const T>(q), heads<const T>(k),
                              heads<const T>(v), scale,     queries,           keys};
  problem.begins = data<const int32_t>(begins);
  problem.value_dim = value_dim;
  return problem;
}

}  // namespace

/// Throws UsageError unless blockwise attention has registers and shared memory for D channels,
/// forward and backward.
template <class T>
void CudaBackend::check_head_dim(int64_t D) const {
  const auto fits = [&](int64_t d) {
    return d <= kMaxHeadDim && AttentionGradients<T, T>::shared_bytes(d) <= limits_.shared_bytes;
  };
  if (fits(D)) return;
  int64_t most = kMaxHeadDim;
  while (!fits(most)) most -= 2;
  usage_error(
      "head_dim={} of attention=blockwise must be at most {} in this dtype on this GPU, of which a "
      "block has {} bytes of shared memory; try a head_dim of {}, or --attention naive",
      D, most, limits_.shared_bytes, most);
}

void CudaBackend::fuse(bool fused) {
  Backend::fuse(fused);
  if (!fused || attention_ == nullptr) return;
  calls_.forward_by = attention_->name_of_forward();
  calls_.decoding_by = attention_->name_of_decoding();
  calls_.backward_by = attention_->name_of_backward(0);
}

bool CudaBackend::fuses_attention(DType dtype, int64_t head_dim, int64_t value_dim) const {
  return dtype == DType::bf16 && attention_ != nullptr &&
         attention_->takes_heads_of(head_dim, value_dim);
}

template <class T, class O>
bool CudaBackend::attend(const Heads<O>& out, accumulate_t<T>* lse,
                         const AttentionProblem<T>& problem) {
  if (!fused()) return false;
  if constexpr (!std::is_same_v<T, double>) {
    const int64_t bytes = attention_ ? attention_->workspace(problem) : 0;
    const Tensor parts = bytes > 0 ? workspace({bytes / 4}, DType::f32) : Tensor();
    if (attention_ && attention_->forward(stream_, out, lse, problem, data<float>(parts))) {
      ++(problem.S == 1 ? calls_.decoding : calls_.forward);
      return true;
    }
  }
  ++calls_.blockwise;
  return false;
}

template <class T, class O>
bool CudaBackend::attend_backward(const AttentionGradients<T, O>& gradients,
                                  const AttentionProblem<T>& problem) {
  if (!fused()) return false;
  if constexpr (std::is_same_v<T, bf16>) {
    const int64_t bytes = attention_ ? attention_->workspace(gradients, problem) : -1;
    if (bytes >= 0) {
      const Tensor rows = workspace({bytes / 4}, DType::f32);
      attention_->backward(stream_, gradients, problem, rows.address());
      calls_.backward_by = attention_->name_of_backward(problem.D);
      ++calls_.backward;
      return true;
    }
  }
  ++calls_.blockwise;
  return false;
}

void CudaBackend::attention_forward(Tensor out, Tensor lse, const Tensor& q, const Tensor& k,
                                    const Tensor& v, double scale, const Positions& queries,
                                    const Positions& keys, const Tensor& begins) {
  with_type(q.dtype(), out.dtype(), [&]<class T, class O>(T, O) {
    const auto problem = attention_problem<T>(q, k, v, scale, queries, keys, begins, value_dim_);
    accumulate_t<T>* const sums = data<accumulate_t<T>>(lse);
    if (attend<T>(heads<O>(out), sums, problem)) return;
    check_head_dim<T>(q.size(3));
    Attention<T, O>::forward(stream_, heads<O>(out), sums, problem);
  });
}

void CudaBackend::attention_merge(Tensor out, Tensor lse, const Tensor& part_out,
                                  const Tensor& part_lse) {
  with_type(out.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    AttentionParts<A>::merge(stream_, heads<A>(out), data<A>(lse), heads<const A>(part_out),
                             data<A>(part_lse), out.size(0), out.size(1), out.size(2), out.size(3));
  });
}

void CudaBackend::attention_rescale(Tensor probs, const Tensor& part_lse, const Tensor& lse) {
  with_type(probs.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    CausalSoftmax<T>::rescale(stream_, data<T>(probs), data<A>(part_lse), data<A>(lse), lse.numel(),
                              probs.size(3));
  });
}

void CudaBackend::attention_delta(Tensor delta, const Tensor& dout, const Tensor& out) {
  with_type(out.dtype(), [&]<class T>(T) {
    AttentionDelta<T>::run(stream_, data<accumulate_t<T>>(delta), heads<const T>(dout),
                           heads<const T>(out), out.size(0), out.size(1), out.size(2), out.size(3));
  });
}

void CudaBackend::attention_backward(Tensor dq, Tensor dk, Tensor dv, const Tensor& dout,
                                     const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& lse, const Tensor& delta, double scale,
                                     const Positions& queries, const Positions& keys,
                                     bool accumulate, const Tensor& begins) {
  with_type(q.dtype(), dq.dtype(), [&]<class T, class O>(T, O) {
    using A = accumulate_t<T>;
    const auto problem = attention_problem<T>(q, k, v, scale, queries, keys, begins, value_dim_);
    const AttentionGradients<T, O> gradients{
        heads<O>(dq),       heads<O>(dk),         heads<O>(dv), heads<const T>(dout),
        data<const A>(lse), data<const A>(delta), accumulate};
    if (attend_backward(gradients, problem)) return;
    check_head_dim<T>(q.size(3));
    gradients.backward(stream_, problem);
  });
}

void CudaBackend::naive_attention_forward(Tensor out, Tensor lse, Tensor probs, const Tensor& q,
                                          const Tensor& k, const Tensor& v, double scale,
                                          const Positions& queries, const Positions& keys,
                                          const Tensor& begins) {
  if (q.numel() == 0 || k.numel() == 0) {  // which the library does not accept
    Backend::naive_attention_forward(out, lse, probs, q, k, v, scale, queries, keys, begins);
    return;
  }
  const int64_t group = q.size(2) / k.size(2);
  for_each_batch(q, k, [&](int64_t b, int64_t n) {
    library_.multiply(scores_of(probs, b, n, group), heads_of(q, b, n, group),
                      transposed(heads_of(k, b, 0, 1)), /*accumulate=*/false);
  });
  causal_softmax_forward(probs, lse, probs, scale, queries, keys, begins);
  for_each_batch(q, k, [&](int64_t b, int64_t n) {
    library_.multiply(heads_of(out, b, n, group), scores_of(probs, b, n, group),
                      heads_of(v, b, 0, 1), false);
  });
}

void CudaBackend::naive_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dscores,
                                           const Tensor& dout, const Tensor& probs, const Tensor& q,
                                           const Tensor& k, const Tensor& v, const Tensor& delta,
                                           double scale, bool accumulate) {
  const int64_t group = q.size(2) / k.size(2);
  for_each_batch(q, k, [&](int64_t b, int64_t n) {
    const Matrices dout_heads = heads_of(dout, b, n, group);
    library_.multiply(scores_of(dscores, b, n, group), dout_heads, transposed(heads_of(v, b, 0, 1)),
                      false);  // of the probabilities
    library_.multiply(heads_of(dv, b, 0, 1), transposed(scores_of(probs, b, n, group)), dout_heads,
                      accumulate || n > 0);
  });
  causal_softmax_backward(dscores, dscores, probs, delta, scale);
  for_each_batch(q, k, [&](int64_t b, int64_t n) {
    const Matrices dscore_heads = scores_of(dscores, b, n, group);
    library_.multiply(heads_of(dq, b, n, group), dscore_heads, heads_of(k, b, 0, 1), accumulate);
    library_.multiply(heads_of(dk, b, 0, 1), transposed(dscore_heads), heads_of(q, b, n, group),
                      accumulate || n > 0);
  });
}

}  // namespace usp::cuda
