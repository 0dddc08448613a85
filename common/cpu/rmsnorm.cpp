#include <algorithm>
#include <cmath>

#include "cpu/cpu_backend.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace usp::cpu {

// [forward]
void CpuBackend::rmsnorm_forward(Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight,
                                 double eps) {
  dispatch(x.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t H = x.size(1);
    T* out = y.data<T>();
    A* scale = rstd.data<A>();
    const T *in = x.data<T>(), *w = weight.data<T>();
    const A epsilon = A(eps);
    parallel_for(x.size(0), 2 * H, [=](int64_t row) {
      const T* in_row = in + row * H;
      const auto square = [=](auto h) { return load(in_row, h) * load(in_row, h); };
      const A r = 1 / std::sqrt(fast_sum<A>(H, square) / A(H) + epsilon);
      scale[row] = r;
      T* out_row = out + row * H;
      const auto element = [=](auto h) { return load(in_row, h) * r * load(w, h); };
      simd_map(out_row, H, element, in_row + H, out_row + H);
    });
  });
}
// [forward]

// Differentiates rmsnorm_forward's `load(in_row, h) * r * load(w, h)` by x, on which r depends too.
void CpuBackend::rmsnorm_backward_input(Tensor dx, const Tensor& dy, const Tensor& x,
                                        const Tensor& weight, const Tensor& rstd,
                                        const Tensor& dresidual) {
  dispatch(x.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    const int64_t H = x.size(1);
    T* out = dx.data<T>();
    const T *grad = dy.data<T>(), *in = x.data<T>(), *w = weight.data<T>();
    const T* bypass = dresidual.defined() ? dresidual.data<T>() : nullptr;
    const A* scale = rstd.data<A>();
    parallel_for(x.size(0), 4 * H, [=](int64_t row) {
      const T *g = grad + row * H, *in_row = in + row * H;
      T* out_row = out + row * H;
      const A r = scale[row];
      // dy * weight along x: the part of the gradient that only changes x's length
      const auto product = [=](auto h) { return load(g, h) * load(w, h) * load(in_row, h); };
      const A along = fast_sum<A>(H, product) * r * r * r / A(H);
      const auto through_norm = [=](auto h) {
        return load(g, h) * load(w, h) * r - load(in_row, h) * along;
      };
      if (bypass != nullptr) {
        const T* bypass_row = bypass + row * H;
        const auto element = [=](auto h) { return through_norm(h) + load(bypass_row, h); };
        simd_map(out_row, H, element, g + H, in_row + H, bypass_row + H, out_row + H);
      } else {
        simd_map(out_row, H, through_norm, g + H, in_row + H, out_row + H);
      }
    });
  });
}

// Differentiates rmsnorm_forward's `load(in_row, h) * r * load(w, h)` by w.
void CpuBackend::rmsnorm_backward_weight(Tensor dweight, const Tensor& dy, const Tensor& x,
                                         const Tensor& rstd, bool accumulate) {
  if (dweight.dtype() != rstd.dtype()) {
    round_sums(dweight, rstd.dtype(), accumulate,
               [&](const Tensor& sums) { rmsnorm_backward_weight(sums, dy, x, rstd, accumulate); });
    return;
  }
  dispatch(x.dtype(), [&]<class T>(T) {
    using A = accumulate_t<T>;
    constexpr int64_t kRows = 64;  // one partial sum per block of rows, whoever computes it
    const int64_t rows = x.size(0), H = x.size(1), blocks = (rows + kRows - 1) / kRows;
    const Tensor partial_sums = workspace({blocks, H}, accumulate_dtype(x.dtype()));
    A *partial = partial_sums.data<A>(), *sum = dweight.data<A>();
    const T *grad = dy.data<T>(), *in = x.data<T>();
    const A* scale = rstd.data<A>();
    parallel_for(blocks, 2 * kRows * H, [=](int64_t block) {
      A* block_sum = partial + block * H;
      std::fill(block_sum, block_sum + H, A{0});
      for (int64_t row = block * kRows; row < std::min(rows, (block + 1) * kRows); ++row) {
        const T *g = grad + row * H, *in_row = in + row * H;
        const A r = scale[row];
#pragma omp simd
        for (int64_t h = 0; h < H; ++h) {
          block_sum[h] += load(g[h]) * load(in_row[h]) * r;
        }
      }
    });
    if (!accumulate) std::fill(sum, sum + H, A{0});
    for (int64_t block = 0; block < blocks; ++block) {
#pragma omp simd
      for (int64_t h = 0; h < H; ++h) sum[h] += partial[block * H + h];
    }
  });
}

}  // namespace usp::cpu
