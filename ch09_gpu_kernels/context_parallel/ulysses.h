#pragma once

#include <memory>
#include <vector>

#include "context_parallel/attention.h"

namespace usp {

/// Attention by exchanged heads: u ranks, each with all heads of its own rows, become ranks with
/// the rows of all and N/u heads each; attention does the rest, and the outputs go back. Jacobs et
/// al., DeepSpeed-Ulysses (2023), https://arxiv.org/abs/2309.14509. Where u groups form a ring, the
/// rows of a group meet the keys of the others as RingAttention says (Fang & Zhao, USP, 2024,
/// https://arxiv.org/abs/2405.07719).
///
/// |        | a rank's own rows       | a rank's own heads                                  |
/// |--------|-------------------------|-----------------------------------------------------|
/// | q, out | [B, S', N, D]           | [B, u S', N/u, D]                                   |
/// | k, v   | [B, S', G, D]           | [B, u S', G/u, D]; where u > G, one head, of which  |
/// |        |                         | u/G ranks have a copy                               |
class UlyssesAttention : public ContextAttention {
 public:
  UlyssesAttention(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                   Probabilities probabilities, const ContextGroup& group);

  Tensor backward(const Tensor& dout, Saved& saved, const Pass& pass, DType dtype) const override;
  Footprint footprint(const PassShape& shape) const override;
  // [scale_scores]
  void scale_scores(double factor) override {
    ContextAttention::scale_scores(factor);  // decoding exchanges no heads
    inner_->scale_scores(factor);
  }
  // [scale_scores]

 protected:
  std::unique_ptr<CoreAttention> inner_;  ///< of the rank's own heads

 private:
  Tensor forward_rows(Tensor qkv, Saved& saved, const Pass& pass) const override;

  /// The heads of a tensor that each member of the group has, as stretches of its axis of heads.
  using HeadsOf = std::vector<Stretch> (UlyssesAttention::*)(int64_t member) const;
  std::vector<Stretch> heads_of_qkv(int64_t member) const;
  std::vector<Stretch> heads_of_out(int64_t member) const;

  /// x [B, S', heads, D] -> [B, u S', the member's heads, D]
  Tensor to_heads(const Tensor& x, HeadsOf heads, std::string_view name) const;
  /// The way back; what several members have is summed.
  Tensor to_rows(const Tensor& y, HeadsOf heads, int64_t all_heads) const;
  /// y [B, u S', ...], the rows that are `member`'s: in one run, or in two.
  struct Run {
    int64_t in_member, in_group, count;
  };
  std::vector<Run> runs(int64_t rows, int64_t member) const;
  Pass of_group(const Pass& pass) const;

  int64_t members() const { return group().config().head_ranks(); }  ///< u
  /// u/G where a kv head has several copies, else 1.
  int64_t copies() const { return std::max<int64_t>(1, members() / num_kv_heads()); }
};

}  // namespace usp
