#include "cuda/backend.h"

#include <cmath>
#include <vector>

#include "cuda/errors.h"
#include "cuda/operands.h"

namespace usp::cuda {

namespace {

/// The axes of y and x, which have one shape, joined where both go on without a gap.
CopyShape copy_shape(const Tensor& y, const Tensor& x) {
  CopyShape shape{{1, 1, 1, 1, 1}, {}, {}, x.contiguous() && y.contiguous()};
  int at = 5;  // the axis that was filled last
  for (int axis = x.rank() - 1; axis >= 0; --axis) {
    if (x.size(axis) == 1) continue;
    if (at < 5 && y.stride(axis) == shape.sizes[at] * shape.to[at] &&
        x.stride(axis) == shape.sizes[at] * shape.from[at]) {
      shape.sizes[at] *= x.size(axis);
    } else {
      --at;
      shape.sizes[at] = x.size(axis);
      shape.to[at] = y.stride(axis);
      shape.from[at] = x.stride(axis);
    }
  }
  return shape;
}

}  // namespace

CudaBackend::CudaBackend(cudaStream_t stream, BackendCounts& counts)
    : stream_(stream),
      library_(stream, counts.detours),
      limits_(limits_of_this_device()),
      calls_(counts.attention) {
  if (make_attention_kernels != nullptr) attention_ = make_attention_kernels(limits_);
}

void CudaBackend::fill(Tensor y, double value) {
  with_type(y.dtype(),
            [&]<class T>(T) { Elementwise<T>::fill(stream_, data<T>(y), y.numel(), value); });
}

void CudaBackend::copy(Tensor y, const Tensor& x) {
  const CopyShape shape = copy_shape(y, x);
  if (x.dtype() == DType::i32 && y.dtype() == DType::i32) {
    Copy<int32_t, int32_t>::run(stream_, data<int32_t>(y), data<int32_t>(x), shape);
    return;
  }
  with_type(y.dtype(), [&]<class To>(To) {
    with_type(x.dtype(), [&]<class From>(From) {
      Copy<To, From>::run(stream_, data<To>(y), data<From>(x), shape);
    });
  });
}

void CudaBackend::add(Tensor y, const Tensor& a, const Tensor& b) {
  with_type(y.dtype(), [&]<class T>(T) {
    Elementwise<T>::add(stream_, data<T>(y), data<T>(a), data<T>(b), y.numel());
  });
}

void CudaBackend::accumulate(Tensor sum, const Tensor& x) {
  with_type(x.dtype(), [&]<class T>(T) {
    Elementwise<T>::accumulate(stream_, data<accumulate_t<T>>(sum), data<T>(x), x.numel());
  });
}

void CudaBackend::matmul(Tensor c, const Tensor& a, const Tensor& b, bool accumulate) {
  if (c.numel() == 0) return;
  if (a.size(1) == 0) {
    for (int64_t row = 0; row < c.size(0) && !accumulate; ++row) fill(c.narrow(0, row, 1), 0);
    return;
  }
  library_.multiply(c, a, b, accumulate);
}

void CudaBackend::matmul_add(Tensor c, const Tensor& a, const Tensor& b, const Tensor& addend) {
  const bool is_product = c.numel() > 0 && a.size(1) > 0;
  if (is_product && library_.multiply_onto(c, a, b, addend)) return;
  Backend::matmul_add(c, a, b, addend);
}

void CudaBackend::embedding_forward(Tensor y, const Tensor& table, const Tensor& tokens,
                                    int64_t vocab_offset) {
  with_type(y.dtype(), [&]<class T>(T) {
    Embedding<T>::forward(stream_, data<T>(y), data<T>(table), data<int32_t>(tokens), y.size(0),
                          table.size(0), y.size(1), vocab_offset);
  });
}

void CudaBackend::embedding_backward(Tensor dtable, const Tensor& dy, const Tensor& tokens,
                                     int64_t vocab_offset, bool accumulate) {
  const Tensor lists =
      workspace({embedding_backward_workspace(dy.size(0), dtable.size(0))}, DType::i32);
  with_type(dy.dtype(), dtable.dtype(), [&]<class T, class G>(T, G) {
    EmbeddingTable<T, G>::backward(stream_, data<G>(dtable), data<T>(dy), data<int32_t>(tokens),
                                   dy.size(0), dtable.size(0), dy.size(1), vocab_offset, accumulate,
                                   data<int32_t>(lists));
  });
}

void CudaBackend::rmsnorm_forward(Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight,
                                  double eps) {
  with_type(x.dtype(), [&]<class T>(T) {
    RmsNorm<T>::forward(stream_, data<T>(y), data<accumulate_t<T>>(rstd), data<T>(x),
                        data<T>(weight), x.size(0), x.size(1), eps);
  });
}

void CudaBackend::rmsnorm_backward_input(Tensor dx, const Tensor& dy, const Tensor& x,
                                         const Tensor& weight, const Tensor& rstd,
                                         const Tensor& dresidual) {
  with_type(x.dtype(), [&]<class T>(T) {
    RmsNorm<T>::backward_input(stream_, data<T>(dx), data<T>(dy), data<T>(x), data<T>(weight),
                               data<accumulate_t<T>>(rstd), data<T>(dresidual), x.size(0),
                               x.size(1));
  });
}

void CudaBackend::rmsnorm_backward_weight(Tensor dweight, const Tensor& dy, const Tensor& x,
                                          const Tensor& rstd, bool accumulate) {
  const Tensor partial = workspace({rmsnorm_partial_sums(x.size(0)), x.size(1)}, rstd.dtype());
  with_type(x.dtype(), dweight.dtype(), [&]<class T, class G>(T, G) {
    using A = accumulate_t<T>;
    RmsNormWeight<T, G>::backward(stream_, data<G>(dweight), data<A>(partial), data<T>(dy),
                                  data<T>(x), data<A>(rstd), x.size(0), x.size(1), accumulate);
  });
}

void CudaBackend::swiglu_forward(Tensor y, const Tensor& gate_up) {
  with_type(y.dtype(), [&]<class T>(T) {
    Elementwise<T>::swiglu_forward(stream_, data<T>(y), data<T>(gate_up), y.size(0), y.size(1));
  });
}

void CudaBackend::swiglu_backward(Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) {
  with_type(dy.dtype(), [&]<class T>(T) {
    Elementwise<T>::swiglu_backward(stream_, data<T>(dgate_up), data<T>(dy), data<T>(gate_up),
                                    dy.size(0), dy.size(1));
  });
}

void CudaBackend::dropout(Tensor y, const Tensor& x, double rate, const RandomStream& random,
                          int64_t first_row) {
  with_type(x.dtype(), [&]<class T>(T) {
    Elementwise<T>::dropout(stream_, data<T>(y), data<T>(x), x.size(0), x.size(1), rate, random,
                            first_row);
  });
}

void CudaBackend::cross_entropy_forward(Tensor row_max, Tensor row_sum, Tensor target_logit,
                                        const Tensor& logits, const Tensor& targets,
                                        int64_t vocab_offset) {
  with_type(logits.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    CrossEntropy<T>::forward(stream_, data<A>(row_max), data<A>(row_sum), data<A>(target_logit),
                             data<T>(logits), data<int32_t>(targets), logits.size(0),
                             logits.size(1), vocab_offset);
  });
}

void CudaBackend::cross_entropy_rescale(Tensor row_sum, const Tensor& row_max, const Tensor& max) {
  with_type(row_sum.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    CrossEntropyRows<A>::rescale(stream_, data<A>(row_sum), data<A>(row_max), data<A>(max),
                                 row_sum.numel());
  });
}

void CudaBackend::cross_entropy_loss(Tensor loss, Tensor lse, const Tensor& row_max,
                                     const Tensor& row_sum, const Tensor& target_logit,
                                     double scale) {
  with_type(lse.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    CrossEntropyRows<A>::loss(stream_, data<double>(loss), data<A>(lse), data<A>(row_max),
                              data<A>(row_sum), data<A>(target_logit), lse.numel(), scale);
  });
}

void CudaBackend::cross_entropy_backward(Tensor dlogits, const Tensor& logits,
                                         const Tensor& targets, const Tensor& lse,
                                         int64_t vocab_offset, double scale) {
  with_type(logits.dtype(), [&]<class T>(T) {
    CrossEntropy<T>::backward(stream_, data<T>(dlogits), data<T>(logits), data<int32_t>(targets),
                              data<accumulate_t<T>>(lse), logits.size(0), logits.size(1),
                              vocab_offset, scale);
  });
}

void CudaBackend::sum_squares(Tensor sum, std::span<const Tensor> xs, bool accumulate) {
  with_type(xs[0].dtype(), [&]<class T>(T) {
    std::vector<typename SumSquares<T>::Range> here;
    int64_t partial_sums = 0;
    for (const Tensor& x : xs) {
      here.push_back({data<T>(x), x.numel()});
      partial_sums += sum_squares_partial_sums(x.numel());
    }
    const Tensor partial = workspace({partial_sums}, DType::f64);
    SumSquares<T>::run(stream_, data<double>(sum), data<double>(partial), here, accumulate);
  });
}

void CudaBackend::clip_coefficient(Tensor coefficient, Tensor norm, const Tensor& sums,
                                   double max_norm) {
  cuda::clip_coefficient(stream_, data<double>(coefficient), data<double>(norm), data<double>(sums),
                         sums.numel(), max_norm);
}

void CudaBackend::adamw(std::span<const AdamWRange> ranges, const Tensor& coefficient,
                        const AdamWSettings& settings) {
  with_type(ranges[0].value.dtype(), ranges[0].grad.dtype(), [&]<class T, class G>(T, G) {
    using A = accumulate_t<T>;
    const AdamWSettings& s = settings;
    const auto t = static_cast<double>(s.step);
    // The moments start at 0; dividing by 1 - beta^t makes them weighted means of the gradients.
    const AdamWFactors<A> factors{.beta1 = A(s.beta1),
                                  .beta2 = A(s.beta2),
                                  .fresh1 = A(1 - s.beta1),
                                  .fresh2 = A(1 - s.beta2),
                                  .unbias1 = A(1 / (1 - std::pow(s.beta1, t))),
                                  .unbias2 = A(1 / (1 - std::pow(s.beta2, t))),
                                  .eps = A(s.eps),
                                  .lr = A(s.lr)};
    std::vector<typename AdamW<T, G>::Range> here;
    here.reserve(ranges.size());
    for (const auto& [value, master, m, v, grad, weight_decay] : ranges) {
      here.push_back({data<T>(value), data<A>(master), data<A>(m), data<A>(v), data<G>(grad),
                      value.numel(), A(1 - s.lr * weight_decay)});
    }
    AdamW<T, G>::run(stream_, here, data<double>(coefficient), factors);
  });
}

}  // namespace usp::cuda

namespace usp {

std::unique_ptr<Backend> make_cuda_backend(cudaStream_t stream, cuda::BackendCounts& counts) {
  return std::make_unique<cuda::CudaBackend>(stream, counts);
}

}  // namespace usp
