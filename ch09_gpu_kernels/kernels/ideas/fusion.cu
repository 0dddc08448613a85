#include "kernels.h"

/// ELU: x where x is not negative, alpha (exp(x) - 1) elsewhere. Operation by operation, as a
/// framework runs torch.where(x < 0, alpha * (torch.exp(x) - 1), x), and in one kernel.
namespace usp::ideas {

namespace {

constexpr float kAlpha = 1.5F;

/// y = f(x, ...), element by element.
template <class F, class Y, class... X>
__global__ void map(int64_t n, F f, Y* y, const X*... x) {
  const int64_t i = cuda::thread_of_grid();
  if (i < n) y[i] = f(x[i]...);
}

struct IsNegative {
  __device__ bool operator()(float x) const { return x < 0; }
};
struct Exp {
  __device__ float operator()(float x) const { return expf(x); }
};
struct MinusOne {
  __device__ float operator()(float x) const { return x - 1; }
};
struct TimesAlpha {
  __device__ float operator()(float x) const { return kAlpha * x; }
};
struct Where {
  __device__ float operator()(bool mask, float yes, float no) const { return mask ? yes : no; }
};
// [fused]
struct Elu {
  __device__ float operator()(float x) const { return x < 0 ? kAlpha * (expf(x) - 1) : x; }
};
// [fused]

template <class F, class Y, class... X>
void queue_map(const cuda::Queue& queue, int64_t n, F f, Y* y, const X*... x) {
  launch(map<F, Y, X...>, blocks_for(n), kThreads, 0, queue, n, f, y, x...);
}

// [op_by_op]
void run_op_by_op(const cuda::Queue& queue, const Data& d) {
  const int64_t n = d.shape.n(), gap = ceil_div(n, 8) * 8;
  auto* const mask = reinterpret_cast<bool*>(d.scratch);
  float *const exp = d.scratch + gap, *const less = exp + gap, *const scaled = less + gap;
  queue_map(queue, n, IsNegative(), mask, d.x);
  queue_map(queue, n, Exp(), exp, d.x);
  queue_map(queue, n, MinusOne(), less, static_cast<const float*>(exp));
  queue_map(queue, n, TimesAlpha(), scaled, static_cast<const float*>(less));
  queue_map(queue, n, Where(), d.y, static_cast<const bool*>(mask),
            static_cast<const float*>(scaled), d.x);
}
// [op_by_op]

/// Floats are read or written ten times, the mask twice.
Counts predict_op_by_op(Shape s) {
  return {.bytes = 10 * bytes_of(s.n()) + 2 * ceil_div(s.n(), kSector) * kSector,
          .flops = 5 * s.n(),
          .launches = 5};
}

const Rung kRungs[] = {
    {"op_by_op", "a kernel an operation", 75, predict_op_by_op, run_op_by_op},
    {"fused", "one kernel", 75,
     [](Shape s) -> Counts { return {.bytes = 2 * bytes_of(s.n()), .flops = 5 * s.n()}; },
     [](const cuda::Queue& queue, const Data& d) {
       queue_map(queue, d.shape.n(), Elu(), d.y, d.x);
     }},
};

}  // namespace

const Ideas kFusion{"fusion", kRungs};

}  // namespace usp::ideas
