#pragma once

#include <memory>

#include "tensor_parallel/linears.h"

namespace usp {

/// The head with its product and the loss fused, so that the logits [T, V] are never there as a
/// whole: a few rows of them at a time, forward and, multiplied once more, backward. Between the
/// two it keeps one number a row, the logarithm of the row's sum. Hsu et al. (2024),
/// https://arxiv.org/abs/2410.10989; Wijmans et al. (2024), https://arxiv.org/abs/2411.09009.
///
/// |          | head, then loss                    | fused                              |
/// |----------|------------------------------------|------------------------------------|
/// | forward  | logits = x Wᵀ; lse of each row     | the same, chunk by chunk           |
/// | keeps    | x [T, H], logits [T, V], lse [T]   | x [T, H], lse [T]                  |
/// | backward | dlogits in place; dx, dW           | logits of a chunk again; then both |
///
/// With t ranks of tp a rank has V/t columns. What crosses the ranks is what the two parts send.
class FusedHead : public Head {
 public:
  /// `table` [V, H]: the weight that `lm_head` multiplies by. `rows`: of logits, at once.
  FusedHead(RmsNorm norm, std::unique_ptr<Linear> lm_head, Parameter& table,
            const TensorRegion& region, int64_t rows);
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  struct Saved {
    RmsNorm::Saved norm;
    Tensor x;    ///< [T, H], or this rank's rows of it where the region gathers again
    Tensor lse;  ///< [T]
  };
  /// What one backward pass computes.
  struct Gradients;

  FusedHead(RmsNorm norm, const Linear& linear, std::unique_ptr<Linear>&& lm_head, Parameter& table,
            const TensorRegion& region, int64_t rows);
  Tensor enter(const Tensor& x, const Pass& pass) const;
  Tensor add_loss(const Tensor& x, const Pass& pass) const;
  Tensor sum_over_ranks(const Tensor& dx) const;

  RmsNorm norm_;
  const Linear* lm_head_;  // the base's
  Parameter* table_;
  TensorRegion region_;
  int64_t rows_;
};

}  // namespace usp
