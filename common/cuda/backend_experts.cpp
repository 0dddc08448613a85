#include <algorithm>
#include <bit>

#include "cuda/backend.h"
#include "cuda/operands.h"
#include "tensor/expert_ops.h"

namespace usp::cuda {

namespace {

/// Calls body(A{}) with the type that routers compute with: float or double.
template <class Body>
void with_router_type(DType dtype, const Body& body) {
  dtype == DType::f64 ? body(double{}) : body(float{});
}

}  // namespace

/// For each shape the library's heuristic is asked, which takes longer than a small product. Of 32
/// shapes from one power of 2 to the next the nearest is at most 1/32 away.
int64_t CudaBackend::unit_of_rows(int64_t rows) const {
  constexpr int kDigits = 6;
  const int digits = static_cast<int>(std::bit_width(static_cast<uint64_t>(rows)));
  return int64_t{1} << std::max(0, digits - kDigits);
}

void CudaBackend::router_scores(Tensor scores, const Tensor& logits, RouterScore kind) {
  with_router_type(scores.dtype(), [&]<class A>(A) {
    Router<A>::scores(stream_, data<A>(scores), data<A>(logits), scores.size(0), scores.size(1),
                      kind == RouterScore::sigmoid);
  });
}

void CudaBackend::router_scores_backward(Tensor dlogits, const Tensor& dscores,
                                         const Tensor& scores, RouterScore kind) {
  with_router_type(scores.dtype(), [&]<class A>(A) {
    Router<A>::scores_backward(stream_, data<A>(dlogits), data<A>(dscores), data<A>(scores),
                               scores.size(0), scores.size(1), kind == RouterScore::sigmoid);
  });
}

void CudaBackend::choose_experts(Tensor choices, const Tensor& scores, const Tensor& bias,
                                 int64_t groups, int64_t allowed) {
  with_router_type(scores.dtype(), [&]<class A>(A) {
    Router<A>::choose(stream_, data<int32_t>(choices), data<A>(scores), data<A>(bias),
                      scores.size(0), scores.size(1), choices.size(1), groups, allowed);
  });
}

void CudaBackend::count_choices(Tensor counts, const Tensor& choices) {
  cuda::count_choices(stream_, data<int32_t>(counts), data<int32_t>(choices), counts.size(0),
                      choices.numel() / counts.size(0), counts.size(1));
}

void CudaBackend::drop_choices(Tensor choices, const Tensor& before, int64_t capacity) {
  const Tensor all = workspace(choices.shape(), DType::i32);
  copy(all, choices);
  cuda::drop_choices(stream_, data<int32_t>(choices), data<int32_t>(all), data<int32_t>(before),
                     before.size(0), choices.numel() / before.size(0), before.size(1), capacity);
}

void CudaBackend::gates_forward(Tensor gates, const Tensor& scores, const Tensor& choices,
                                bool normalised, double scale) {
  with_router_type(scores.dtype(), [&]<class A>(A) {
    Router<A>::gates(stream_, data<A>(gates), data<A>(scores), data<int32_t>(choices),
                     scores.size(0), scores.size(1), choices.size(1), normalised, scale);
  });
}

void CudaBackend::gates_backward(Tensor dscores, const Tensor& dgates, const Tensor& gates,
                                 const Tensor& scores, const Tensor& choices, bool normalised,
                                 double scale) {
  with_router_type(scores.dtype(), [&]<class A>(A) {
    Router<A>::gates_backward(stream_, data<A>(dscores), data<A>(dgates), data<A>(gates),
                              data<A>(scores), data<int32_t>(choices), scores.size(0),
                              scores.size(1), choices.size(1), normalised, scale);
  });
}

void CudaBackend::assign_slots(Tensor slots, const Tensor& choices,
                               std::span<const int64_t> counts) {
  cuda::assign_slots(stream_, data<int32_t>(slots), data<int32_t>(choices), choices.numel(),
                     static_cast<int64_t>(counts.size()));
}

void CudaBackend::permute(Tensor rows, const Tensor& x, const Tensor& slots) {
  with_type(x.dtype(), [&]<class T>(T) {
    ExpertRows<T>::permute(stream_, data<T>(rows), data<T>(x), data<int32_t>(slots), x.size(0),
                           x.size(1), slots.size(1));
  });
}

void CudaBackend::unpermute(Tensor y, const Tensor& rows, const Tensor& slots, const Tensor& gates,
                            const Tensor& first) {
  with_type(y.dtype(), [&]<class T>(T) {
    ExpertRows<T>::unpermute(stream_, data<T>(y), data<T>(rows), data<int32_t>(slots),
                             data<accumulate_t<T>>(gates), data<T>(first), y.size(0), y.size(1),
                             slots.size(1));
  });
}

void CudaBackend::unpermute_backward(Tensor drows, Tensor dgates, const Tensor& dy,
                                     const Tensor& rows, const Tensor& slots, const Tensor& gates) {
  with_type(dy.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    ExpertRows<T>::unpermute_backward(stream_, data<T>(drows), data<A>(dgates), data<T>(dy),
                                      data<T>(rows), data<int32_t>(slots), data<A>(gates),
                                      dy.size(0), dy.size(1), slots.size(1));
  });
}

void CudaBackend::balance_loss_forward(Tensor loss, const Tensor& scores, const Tensor& load,
                                       double scale, bool normalised) {
  const Tensor terms = workspace({scores.size(0)}, DType::f64);
  with_router_type(scores.dtype(), [&]<class A>(A) {
    Router<A>::balance_loss(stream_, data<double>(loss), data<double>(terms), data<A>(scores),
                            data<A>(load), scores.size(0), scores.size(1),
                            scores.size(0) / load.size(0), scale, normalised);
  });
}

void CudaBackend::balance_loss_backward(Tensor dscores, const Tensor& scores, const Tensor& load,
                                        double scale, bool normalised) {
  with_router_type(scores.dtype(), [&]<class A>(A) {
    Router<A>::balance_loss_backward(stream_, data<A>(dscores), data<A>(scores), data<A>(load),
                                     scores.size(0), scores.size(1), scores.size(0) / load.size(0),
                                     scale, normalised);
  });
}

void CudaBackend::z_loss_forward(Tensor loss, const Tensor& logits, double scale) {
  const Tensor terms = workspace({logits.size(0)}, DType::f64);
  with_router_type(logits.dtype(), [&]<class A>(A) {
    Router<A>::z_loss(stream_, data<double>(loss), data<double>(terms), data<A>(logits),
                      logits.size(0), logits.size(1), scale);
  });
}

void CudaBackend::z_loss_backward(Tensor dlogits, const Tensor& logits, double scale) {
  with_router_type(logits.dtype(), [&]<class A>(A) {
    Router<A>::z_loss_backward(stream_, data<A>(dlogits), data<A>(logits), logits.size(0),
                               logits.size(1), scale);
  });
}

void CudaBackend::router_entropy(Tensor sum, const Tensor& scores) {
  const Tensor terms = workspace({scores.size(0)}, DType::f64);
  with_router_type(scores.dtype(), [&]<class A>(A) {
    Router<A>::entropy(stream_, data<double>(sum), data<double>(terms), data<A>(scores),
                       scores.size(0), scores.size(1));
  });
}

void CudaBackend::balance_bias(Tensor bias, const Tensor& load, double rate) {
  with_router_type(bias.dtype(), [&]<class A>(A) {
    Router<A>::balance_bias(stream_, data<A>(bias), data<A>(load), bias.numel(), rate);
  });
}

}  // namespace usp::cuda
