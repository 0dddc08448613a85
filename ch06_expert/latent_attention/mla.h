#pragma once

#include <memory>
#include <optional>
#include <string>

#include "latent_attention/ring.h"
#include "tensor_parallel/region.h"
#include "train/model_config.h"

/// Multi-head latent attention: keys and values of all heads are made of one narrow vector of each
/// position, and a cache holds that vector. DeepSeek-AI, DeepSeek-V2 (2024),
/// https://arxiv.org/abs/2405.04434.
///
/// Dimensions: T = B S tokens, of which R lie on this rank outside the region of tp (R = T without
/// sequence parallelism), H hidden_size, N heads of this rank, D = nope + rope channels of a query
/// and a key, V channels of a value (v_head_dim), C kv_lora_rank, Q q_lora_rank.
namespace usp {

// [latent_query]
/// x -> the queries: q_b_proj(q_a_layernorm(q_a_proj(x))), or q_proj(x). The region of tp begins at
/// the latent, which is narrower than x.
class LatentQuery {
 public:
  struct Saved {
    Linear::Saved q_a_proj, q_b_proj;
    RmsNorm::Saved norm;
  };

  /// Without a latent q_a_proj and norm are empty, and q_b_proj is q_proj.
  LatentQuery(std::unique_ptr<Linear> q_a_proj, std::optional<RmsNorm> norm,
              std::unique_ptr<Linear> q_b_proj);
  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) const;  ///< [R, H] -> [T, N D]
  Tensor backward(const Tensor& dq, Saved& saved, Grads& grads,
                  const Pass& pass) const;  ///< [T, N D] -> [R, H]
  Footprint footprint(const PassShape& shape) const;

 private:
  std::unique_ptr<Linear> q_a_proj_;
  std::optional<RmsNorm> norm_;
  std::unique_ptr<Linear> q_b_proj_;
};
// [latent_query]

// [latent_keys]
/// x -> the latent of keys and values, and what all heads' keys have in common; then the heads' own
/// parts.
class LatentKeys {
 public:
  struct Saved {
    Linear::Saved kv_a_proj, kv_b_proj;
    RmsNorm::Saved norm;
  };
  /// What keys and values are made of.
  struct Latent {
    Tensor c_kv;    ///< [R, C], normed
    Tensor k_rope;  ///< [R, rope], not rotated
  };

  /// `kv_b`: the weight of kv_b_proj, of which decoding reads its two parts head by head.
  LatentKeys(const MlaShape& shape, std::unique_ptr<Linear> kv_a_proj, RmsNorm norm,
             std::unique_ptr<Linear> kv_b_proj, Parameter& kv_b);
  Latent compress(const Tensor& x, Saved& saved, const Pass& pass) const;  ///< x [R, H]
  /// c_kv [R, C] -> [T, N (nope + V)]: each head's k without position, then its v
  Tensor expand(const Tensor& c_kv, Saved& saved, const Pass& pass) const;
  /// dkv as expand() returns kv -> dc_kv [R, C]
  Tensor expand_backward(const Tensor& dkv, Saved& saved, Grads& grads, const Pass& pass) const;
  /// dc_kv [R, C] -> the gradient before the norm [R, C]
  Tensor norm_backward(const Tensor& dc_kv, Saved& saved, Grads& grads) const;
  /// dc [R, C + rope] -> [R, H]
  Tensor compress_backward(const Tensor& dc, Saved& saved, Grads& grads, const Pass& pass) const;

  Tensor key_weight(int64_t head) const;                  ///< [nope, C]
  Tensor value_weight(int64_t head) const;                ///< [V, C]
  Parameter& expansion_weight() const { return *kv_b_; }  ///< kv_b_proj's, of this rank's heads

  /// `expands`: of expand() too.
  Footprint footprint(const PassShape& shape, bool expands) const;

 private:
  MlaShape shape_;
  std::unique_ptr<Linear> kv_a_proj_;
  RmsNorm norm_;
  std::unique_ptr<Linear> kv_b_proj_;
  Parameter* kv_b_;
};
// [latent_keys]

// [latent_attention]
/// The first half of a block: x + o_proj(attention), with keys and values made of latents.
///
/// Training makes the keys and values of all heads, in the form in which CoreAttention reads them:
/// N kv heads of D channels, of which a value fills V; the rest is 0. The products with these zeros
/// are computed: (D - V) / 2D of the operations of attention are for nothing.
///
/// Over a ring, latents travel and every rank makes its heads' keys and values of them: LatentRing.
/// There what enters the region of tp is the latent with the shared part of the keys, [R, C +
/// rope], and its gradient leaves it when it has come home.
class LatentAttention : public Segment {
 public:
  LatentAttention(const MlaShape& shape, RmsNorm norm, LatentQuery query, LatentKeys keys,
                  const RopeTable& rope, std::unique_ptr<CoreAttention> core,
                  std::unique_ptr<Linear> o_proj, const TensorRegion& region,
                  const ContextGroup& context);
  std::string_view name() const override { return "attention"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  void keep_through_recompute(BlockSaved& saved, BlockSaved& kept) const override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  struct Saved {
    RmsNorm::Saved norm;
    LatentQuery::Saved query;
    LatentKeys::Saved keys;
    CoreAttention::Saved core;
    Tensor latents;  ///< over a ring: [R, C + rope] not rotated, or [T, C + rope] rotated
    Tensor out;      ///< [B, S, N, D], what core returned
    Linear::Saved o_proj;
  };

  /// Whether latents travel. What is decoded without a cache is replicated.
  bool passes_latents_on(const Pass& pass) const {
    return ring_ != nullptr && pass.mode != Pass::Mode::decode;
  }
  /// -> [B, S, N, D], of which a head's first V channels are its value.
  Tensor attend_over_ring(const Tensor& normed, Saved& kept, const Pass& pass) const;
  Tensor attend(const Tensor& normed, Saved& kept, const Pass& pass) const;  ///< -> [T, N V]
  /// The same of a text that grows. The cache holds [latent | rotated key], C + rope numbers of a
  /// position for all heads. A head's score q · (W_k c) is (W_kᵀ q) · c: the query goes to the
  /// space of latents, and what it finds there comes out through the weight of the values, once.
  Tensor attend_cached(const Tensor& normed, const Pass& pass) const;
  Tensor absorbed_queries(const Tensor& normed, const Pass& pass) const;  ///< [B, S, N, C + rope]
  Tensor latents(const Tensor& normed, const Pass& pass) const;           ///< [B, S, 1, C + rope]
  Tensor joined(const LatentKeys::Latent& latent) const;                  ///< [R, C + rope]
  /// [T, C + rope] -> [B, S, 1, C + rope], the same memory: what keys have in common, rotated.
  Tensor turned(const Tensor& latents, const Pass& pass) const;
  void fill_queries(const Tensor& qkv, const Tensor& normed, Saved& kept, const Pass& pass) const;
  void fill_keys(const Tensor& qkv, const Tensor& normed, Saved& kept, const Pass& pass) const;

  /// Gradients of what the projections returned.
  struct Projected {
    Tensor dq;      ///< [T, N D]
    Tensor dkv;     ///< [T, N (nope + V)]; undefined over a ring
    Tensor shared;  ///< [T, rope], over a ring [T, C + rope]: a partial sum over heads
  };
  Projected attend_backward(const Tensor& dheads, Saved& kept, Grads& grads,
                            const Pass& pass) const;
  Projected attend_backward_over_ring(const Tensor& dheads, Saved& kept, Grads& grads,
                                      const Pass& pass) const;
  Tensor padded(const Tensor& dheads, const Pass& pass) const;  ///< [T, N V] -> [B, S, N, D]

  Tensor rotated(const Tensor& qkv) const;  ///< the queries' channels that RoPE turns

  MlaShape shape_;
  RmsNorm norm_;
  LatentQuery query_;
  LatentKeys keys_;
  RopeTable rope_;
  std::unique_ptr<CoreAttention> core_;
  const LatentRing* ring_;  ///< core_, where it is one
  std::unique_ptr<Linear> o_proj_;
  TensorRegion region_;
  ContextGroup context_;
};
// [latent_attention]

/// How a layer's latent attention is run.
struct LatentOptions {
  std::string prefix;                ///< of the names of its weights, such as "model.layers.0."
  double init_std, output_init_std;  ///< of its weights; of o_proj's
  Probabilities probabilities;
  RopeTable rope;        ///< of qk_rope_head_dim channels
  TensorRegion region;   ///< shards its heads
  ContextGroup context;  ///< shards the tokens of a sample
};
/// The first half of a layer, whose weights it adds to the list.
std::unique_ptr<Segment> make_latent_attention(const ModelConfig& config,
                                               const LatentOptions& options,
                                               ParameterList& parameters);

}  // namespace usp
