#pragma once

#include <memory>
#include <vector>

#include "tensor/ops.h"
#include "train/rope.h"
#include "train/segment.h"

namespace usp {

// Dimensions in this file: B samples of S positions, T = B S tokens, H hidden_size, N heads,
// G kv heads, D head_dim, F ffn_hidden_size, V vocab_size.

/// y = x Wᵀ, no bias. W [O, I] may be several parameters stacked (q, k and v): one matmul serves
/// them all. No other class multiplies by a matrix of weights.
///
/// forward() and backward() call keep() and the three matmuls of a linear layer.
class Linear {
 public:
  /// The input, in the form in which output() and weight_gradient() read it. keep() chooses the
  /// form.
  struct Saved {
    Tensor x;  ///< [T, I]
  };

  /// `output_name`: what the memory profile calls y.
  explicit Linear(std::vector<Parameter*> weights, std::string_view output_name = "linear");
  virtual ~Linear() = default;
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  virtual Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) const;  ///< -> [T, O]
  /// The same, added to the residual [T, O] where that is defined.
  virtual Tensor forward_onto(const Tensor& residual, const Tensor& x, Saved& saved,
                              const Pass& pass) const;
  virtual Tensor backward(const Tensor& dy, Saved& saved, Grads& grads,
                          const Pass& pass) const;  ///< -> [T, I]
  virtual Footprint footprint(const PassShape& shape) const;

 protected:
  virtual Saved keep(const Tensor& x) const { return {x}; }  ///< what backward reads of x
  /// y = x Wᵀ, or residual + x Wᵀ where the residual is defined
  virtual Tensor output(const Saved& saved, const Tensor& residual) const;
  virtual Tensor input_gradient(const Tensor& dy) const;  ///< dx = dy W
  virtual void weight_gradient(const Tensor& dy, const Saved& saved,
                               bool accumulate) const;  ///< dW = or += dyᵀ x
  /// Hands `grads` a closure that computes the weight gradient, perhaps later. The closure shares
  /// dy and `saved`.
  void add_weight_gradient(const Tensor& dy, const Saved& saved, Grads& grads) const;

  /// [O, I], as output() and input_gradient() read it
  virtual Tensor weight() const { return stacked(weights_, &Parameter::value); }
  /// [O, I]: the parameters' `grad`
  Tensor weight_grad() const { return stacked(weights_, &Parameter::grad); }
  const std::vector<Parameter*>& parameters() const { return weights_; }
  std::string_view output_name() const { return output_name_; }

 private:
  std::vector<Parameter*> weights_;
  std::string_view output_name_;
};

/// y = x / sqrt(mean(x²) + eps) * weight, per token. Zhang & Sennrich (2019),
/// https://arxiv.org/abs/1910.07467.
class RmsNorm {
 public:
  struct Saved {
    Tensor x;     ///< [T, H]
    Tensor rstd;  ///< [T]
  };

  RmsNorm(Parameter& weight, double eps) : weight_(&weight), eps_(eps) { ++weight.uses; }

  Tensor forward(const Tensor& x, Saved& saved) const;  ///< [T, H] -> [T, H]
  /// `dresidual`: the gradient that reaches x along the residual stream; may be undefined.
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Tensor& dresidual) const;
  Footprint footprint(const PassShape& shape) const;

 private:
  Parameter* weight_;
  double eps_;
};

/// Tokens to vectors: x[t] = weight[tokens[t]].
class Embedding : public Segment {
 public:
  explicit Embedding(Parameter& weight) : weight_(&weight) { ++weight.uses; }
  std::string_view name() const override { return "embedding"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;  ///< x is not read
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  Parameter* weight_;
};

/// What becomes of the attention probabilities [B, N, S, S], the largest activation of a long
/// sequence.
enum class Probabilities {
  never_whole,  ///< blockwise attention: a few rows at a time, here and again in backward
  stored,       ///< naive attention
  recomputed,   ///< naive attention, selective recomputation: dropped, and made anew in backward
};

/// Mixes the tokens of a sample: every query head takes softmax(q kᵀ / sqrt(D)) v over the keys at
/// or before the query's position. It has no parameters.
///
/// It reads the rotated projections qkv [B, S, N + 2G, D]: N query heads, then G key heads, then G
/// value heads. A kv head serves N/G query heads in a row.
class CoreAttention {
 public:
  struct Saved {
    Tensor qkv;    ///< [B, S, N + 2G, D]
    Tensor out;    ///< [B, S, N, D]
    Tensor lse;    ///< [B, N, S]
    Tensor probs;  ///< [B, N, S, keys], where stored
  };

  CoreAttention(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                Probabilities probabilities);
  virtual ~CoreAttention() = default;
  CoreAttention(const CoreAttention&) = delete;
  CoreAttention& operator=(const CoreAttention&) = delete;

  /// -> out [B, S, N, D]. With pass.kv_cache, over the positions in the cache as well.
  virtual Tensor forward(Tensor qkv, Saved& saved, const Pass& pass) const;
  /// dout [B, S, N, D] -> dqkv [B, S, N + 2G, D] in `dtype`: that of dout, or its acc dtype where
  /// something is still to be added
  virtual Tensor backward(const Tensor& dout, Saved& saved, const Pass& pass, DType dtype) const;
  virtual Footprint footprint(const PassShape& shape) const;
  // [keeps]
  /// Whether `out` and `lse` outlive a forward pass that will be recomputed. forward() then finds
  /// them in `saved`.
  virtual bool keeps_through_recompute() const { return false; }
  // [keeps]

  int64_t num_heads() const { return heads_; }        ///< N
  int64_t num_kv_heads() const { return kv_heads_; }  ///< G
  int64_t head_dim() const { return head_dim_; }      ///< D
  double scale() const { return scale_; }             ///< of the scores
  // [scale_scores]
  /// Multiplies scores by a factor besides 1 / sqrt(D).
  virtual void scale_scores(double factor) { scale_ *= factor; }
  // [scale_scores]

 protected:
  Tensor q_of(const Tensor& qkv) const { return qkv.narrow(2, 0, heads_); }
  Tensor k_of(const Tensor& qkv) const { return qkv.narrow(2, heads_, kv_heads_); }
  Tensor v_of(const Tensor& qkv) const { return qkv.narrow(2, heads_ + kv_heads_, kv_heads_); }
  Tensor kv_of(const Tensor& qkv) const { return qkv.narrow(2, heads_, 2 * kv_heads_); }
  Probabilities probabilities() const { return probabilities_; }

 private:
  /// Fills out and lse; -> probs, undefined in blockwise attention.
  Tensor attend(const Tensor& out, const Tensor& lse, const Tensor& qkv, const Pass& pass) const;

  int64_t heads_, kv_heads_, head_dim_;
  double scale_;
  Probabilities probabilities_;
};

/// The first half of a block: x + o_proj(attention(rope(q), rope(k), v)), q, k, v from norm(x).
class Attention : public Segment {
 public:
  Attention(RmsNorm norm, std::unique_ptr<Linear> qkv_proj, const RopeTable& rope,
            std::unique_ptr<CoreAttention> core, std::unique_ptr<Linear> o_proj);
  std::string_view name() const override { return "attention"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;
  // [keep]
  void keep_through_recompute(BlockSaved& saved, BlockSaved& kept) const override;
  // [keep]

 private:
  struct Saved {
    RmsNorm::Saved norm;
    Linear::Saved qkv_proj, o_proj;
    CoreAttention::Saved core;
  };

  RmsNorm norm_;
  std::unique_ptr<Linear> qkv_proj_;
  RopeTable rope_;
  std::unique_ptr<CoreAttention> core_;
  std::unique_ptr<Linear> o_proj_;
};

/// SwiGLU: down_proj(silu(gate) * up), gate and up two projections of x. Shazeer (2020),
/// https://arxiv.org/abs/2002.05202.
class FeedForward {
 public:
  struct Saved {
    Linear::Saved gate_up_proj, down_proj;
    Tensor gate_up;  ///< [T, 2F]
  };

  FeedForward(std::unique_ptr<Linear> gate_up_proj, std::unique_ptr<Linear> down_proj)
      : gate_up_proj_(std::move(gate_up_proj)), down_proj_(std::move(down_proj)) {}
  /// [T, H] -> [T, H], added to the residual where that is defined
  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass,
                 const Tensor& residual = {}) const;
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads,
                  const Pass& pass) const;  ///< [T, H] -> [T, H]
  Footprint footprint(const PassShape& shape) const;
  // [fuse]
  /// silu(gate) * up is no longer kept: backward makes it again.
  void fuse() { fused_ = true; }
  // [fuse]

 private:
  // [fused]
  bool fused_ = false;
  // [fused]
  std::unique_ptr<Linear> gate_up_proj_, down_proj_;
};

/// The second half of a block: x + feed_forward(norm(x)).
class Mlp : public Segment {
 public:
  Mlp(RmsNorm norm, FeedForward feed_forward)
      : norm_(norm), feed_forward_(std::move(feed_forward)) {}
  std::string_view name() const override { return "mlp"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  struct Saved {
    RmsNorm::Saved norm;
    FeedForward::Saved feed_forward;
  };

  RmsNorm norm_;
  FeedForward feed_forward_;
};

/// Logits to the loss, row by row: -log softmax(logits)[target].
class CrossEntropy {
 public:
  struct Saved {
    Tensor logits;  ///< [T, V]
    Tensor lse;     ///< [T]: log of the sum of exp(logits)
  };

  /// `vocab_offset`: the token that column 0 of the logits stands for.
  explicit CrossEntropy(int64_t vocab_offset) : vocab_offset_(vocab_offset) {}
  virtual ~CrossEntropy() = default;

  /// Adds to pass.loss.
  virtual void forward(const Tensor& logits, Saved& saved, const Pass& pass) const;
  /// -> dlogits [T, V], in the memory of the logits
  Tensor backward(Saved& saved, const Pass& pass) const;
  virtual Footprint footprint(const PassShape& shape) const;

 protected:
  /// Largest value, sum of exp(logit - largest) and target's logit of each row of logits.
  struct Rows {
    Tensor max, sum, target_logit;  ///< [T]
  };
  Rows rows_of(const Tensor& logits, const Pass& pass) const;  ///< logits [T, V]
  /// loss += the loss of the rows; returns the rows' lse [T].
  Tensor add_loss(const Tensor& loss, const Rows& rows, const Pass& pass) const;

 private:
  int64_t vocab_offset_;
};

/// Vectors to the loss: final norm, logits, cross entropy. forward() adds to pass.loss and returns
/// an undefined tensor; backward() starts the chain and reads no dy.
class Head : public Segment {
 public:
  Head(RmsNorm norm, std::unique_ptr<Linear> lm_head, std::unique_ptr<CrossEntropy> cross_entropy);
  std::string_view name() const override { return "head"; }
  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;
  Tensor logits(const Tensor& x, const Pass& pass) const;  ///< [T, H] -> [T, V], nothing saved

 private:
  struct Saved {
    RmsNorm::Saved norm;
    Linear::Saved lm_head;
    CrossEntropy::Saved cross_entropy;
  };

  RmsNorm norm_;
  std::unique_ptr<Linear> lm_head_;
  std::unique_ptr<CrossEntropy> cross_entropy_;
};

}  // namespace usp
