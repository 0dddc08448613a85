#pragma once

#include "config.h"
#include "context_parallel/ring_attention.h"

namespace usp {

/// Where a rank has the latents of its own rows, they travel instead of the keys and values that
/// are made of them: C + rope numbers of a position instead of 2 N D. Every rank makes its own
/// heads' keys and values of a block when it arrives.
///
/// Dimensions: S' positions of one place, N heads of this rank, D = nope + rope channels of a query
/// and a key, V of a value, C kv_lora_rank. A latent is [c_kv | rotated k_rope], C + rope wide.

// [expansion]
/// Keys and values of a rank's heads from latents, and the gradients back.
class LatentExpansion {
 public:
  /// `kv_b`: the weight of kv_b_proj, of which the rank has N (nope + V) rows.
  LatentExpansion(const MlaShape& shape, int64_t num_heads, Parameter& kv_b)
      : shape_(shape), heads_(num_heads), kv_b_(&kv_b) {}

  /// latents [B, S', 1, C + rope] -> [B, S', 2N, D]: the heads' keys, then their values
  Tensor expand(const Tensor& latents) const;
  /// dkv as expand() returns kv -> dlatents [B, S', 1, C + rope] = the gradient through this rank's
  /// heads; weight_sum [N (nope + V), C] += that of the weight. All three in acc dtype.
  void backward(const Tensor& dlatents, const Tensor& weight_sum, const Tensor& dkv,
                const Tensor& latents) const;
  /// Zeros for a micro-batch's gradient of the weight, to which every block adds.
  Tensor weight_sum(DType acc) const;
  /// The micro-batch's one contribution to the weight's gradient. W adds what is summed already.
  void add_weight_gradient(const Tensor& weight_sum, Grads& grads) const;

  /// [B, S', 2N, D], of such latents.
  Shape heads_shape(const Tensor& latents) const {
    return {latents.size(0), latents.size(1), 2 * heads_, shape_.head_dim()};
  }
  /// N (nope + V): a position's numbers before they are spread over heads of D channels.
  int64_t rows() const { return heads_ * (shape_.qk_nope_head_dim + shape_.v_head_dim); }
  const MlaShape& shape() const { return shape_; }

 private:
  MlaShape shape_;
  int64_t heads_;
  Parameter* kv_b_;
};

/// kv [B, S', 2N, D] = each head's [k_nope | k_rope] and [v | 0], from expanded [B, S', N, nope +
/// V] and k_rope [B, S', 1, rope].
void spread_heads(const Tensor& kv, const Tensor& expanded, const Tensor& k_rope,
                  const MlaShape& shape);
/// The way back: the gradient of `expanded`, in `dtype`.
Tensor gather_heads(const Tensor& dkv, DType dtype, const MlaShape& shape);
/// dkv [B, S', 2N, D] -> [B, S', 1, rope] in acc dtype: the sum over this rank's heads of the
/// gradient of what their keys have in common.
Tensor shared_key_gradient(const Tensor& dkv, DType acc, const MlaShape& shape);
// [expansion]

// [latent_ring]
/// Ring attention that passes latents on.
///
/// Let w be the bytes of C + rope numbers in the run's dtype, and w' in acc dtype. For each
/// position of a sample a layer makes each of cp ranks send, by either cp_method,
///
/// |                 | forward                     | backward                         |
/// |-----------------|-----------------------------|----------------------------------|
/// | latents         | (cp-1)/cp w                 | (cp-1)/cp (w + w')               |
/// | keys and values | (cp-1)/cp of 2 N D numbers  | the same, and of their gradients |
///
/// Each place sums its heads' gradients of a block into w' before it passes that on. What ranks of
/// tp have of it is summed over tp at home. A block that no query sees is not expanded. Backward
/// makes a block's keys and values again, so not even those of the own block are kept.
class LatentRing : public RingAttention {
 public:
  LatentRing(int64_t num_heads, const MlaShape& shape, Parameter& kv_b, Probabilities probabilities,
             const ContextGroup& group)
      : RingAttention(num_heads, num_heads, shape.head_dim(), probabilities, group),
        expansion_(shape, num_heads, kv_b) {}

  /// q [B, S', N, D] rotated, latents [B, S', 1, C + rope] of the same rows -> [B, S', N, D].
  /// Keeps q as saved.qkv.
  Tensor attend_latents(Tensor q, const Tensor& latents, Saved& saved, const Pass& pass) const;
  /// In acc dtype.
  struct Gradients {
    Tensor dq;        ///< [B, S', N, D]
    Tensor dlatents;  ///< [B, S', 1, C + rope]: from all queries, through this rank's heads
  };
  /// dout [B, S', N, D], the latents of forward; `grads` gets the expansion's weight gradient.
  Gradients backward_latents(const Tensor& dout, const Tensor& latents, Saved& saved, Grads& grads,
                             const Pass& pass) const;
  /// Beside the latents.
  Footprint footprint(const PassShape& shape) const override;

 private:
  LatentExpansion expansion_;
};
// [latent_ring]

/// Whether a run's ring carries latents. Where ranks exchange heads, keys and values are made
/// first.
bool passes_latents_on(const ModelConfig& model, const ContextParallelConfig& context);
/// Operations of a layer, for each token of a rank, in products with kv_b_proj's weight beyond
/// one in forward and two in backward. Of the b blocks that the first place reads, b - 1 are not
/// its own, and take three more; and all are expanded again in backward: 4 (b - 1) + 1 products. A
/// recomputed forward pass expands b blocks more, or none where attention's output is kept.
double expansion_flops_again(const TrainConfig& config);

}  // namespace usp
