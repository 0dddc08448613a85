#pragma once

#include <memory>

#include "context_parallel/group.h"
#include "layers.h"

namespace usp {

/// Attention where a rank has the queries, keys and values of its own rows, and others have those
/// of the rest of each sample.
class ContextAttention : public CoreAttention {
 public:
  ContextAttention(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                   Probabilities probabilities, const ContextGroup& group)
      : CoreAttention(num_heads, num_kv_heads, head_dim, probabilities), group_(group) {}

  Tensor forward(Tensor qkv, Saved& saved, const Pass& pass) const override;
  bool keeps_through_recompute() const override { return group_.config().cp_recompute == "keep"; }

 protected:
  /// Attention to some of the keys: its sums are over these alone.
  struct Part {
    Tensor out;  ///< [B, S, N, D], acc dtype
    Tensor lse;  ///< [B, N, S]
  };
  /// `kv` [B, keys, 2G, D]; `probs` [B, N, S, keys] or undefined.
  Part attend(const Tensor& qkv, const Tensor& kv, const Positions& keys, const Tensor& probs,
              const Pass& pass) const;
  Tensor keys_of(const Tensor& kv) const { return kv.narrow(2, 0, num_kv_heads()); }
  Tensor values_of(const Tensor& kv) const { return kv.narrow(2, num_kv_heads(), num_kv_heads()); }
  const ContextGroup& group() const { return group_; }

 private:
  /// forward() where every rank has its own rows.
  virtual Tensor forward_rows(Tensor qkv, Saved& saved, const Pass& pass) const = 0;
  /// A text that grows has one token at a time: every rank has its query, and a share of the cached
  /// keys. What the ranks find is merged.
  Tensor decode(const Tensor& qkv, const Pass& pass) const;

  ContextGroup group_;
};

/// From attention to each rank's share of the keys, `out` [B, S, N, D] and `lse` [B, N, S] in acc
/// dtype: attention to all of them, out [B, S, N, D] in `dtype`, the same bits on every rank.
Tensor merge_shares(const Tensor& out, const Tensor& lse, DType dtype, const Communicator& cp);

/// x in this dtype: x itself, where it has it.
Tensor in_dtype(const Tensor& x, DType dtype);

/// The attention of a run: of one rank, over a ring, by exchanged heads, or both.
std::unique_ptr<CoreAttention> make_core_attention(int64_t num_heads, int64_t num_kv_heads,
                                                   int64_t head_dim, Probabilities probabilities,
                                                   const ContextGroup& group);

}  // namespace usp
