#pragma once

#include "cuda/reduce.h"
#include "fragments.h"

/// Where the keys of a query were split: its parts come together.
namespace usp::attention {

// [merge]
/// A warp a row: the parts' outputs, each weighted by exp(its lse - the lse of all).
template <int width>
__global__ void __launch_bounds__(cuda::kThreads) merge_kernel(Problem<bf16> p) {
  constexpr int kWarp = cuda::kWarp, kEach = width / kWarp;
  const int row = static_cast<int>(cuda::warp_of_grid()), lane = cuda::lane();
  const int64_t rows = int64_t{p.samples} * p.heads;
  if (row >= rows) return;
  const float* const outs = p.scratch + row * width + lane * kEach;
  const float* const lses = p.scratch + p.splits * rows * width + row;
  cuda::SoftmaxSum<float> own;
  for (int part = lane; part < p.splits; part += kWarp) own.add(lses[part * rows], 1);
  const cuda::SoftmaxSum<float> all = cuda::warp_softmax_sum(own);
  const float lse = all.max + logf(all.sum), shift = OnlineSoftmax::shift_of(lse);
  cuda::Numbers<float, kEach> out{};
  for (int first = 0; first < p.splits; first += kWarp) {
    const int part = first + lane;
    const float own_weight = part < p.splits ? expf(lses[part * rows] - shift) : 0;
    for (int i = 0; i < kWarp && first + i < p.splits; ++i) {
      const float weight = __shfl_sync(cuda::kAllLanes, own_weight, i);
      const auto x = cuda::load_pack<kEach>(outs + (first + i) * rows * width);
      for (int c = 0; c < kEach; ++c) out[c] += weight * x[c];
    }
  }
  const Head<bf16> head(p, row);
  if (lane == 0) *head.lse = lse;
  if (head.wide_out == nullptr) {
    cuda::store_pack<kEach>(head.out + lane * kEach, out);
  } else {
    cuda::store_pack<kEach>(head.wide_out + lane * kEach, out);
  }
}
// [merge]

}  // namespace usp::attention
