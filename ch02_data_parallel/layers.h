#pragma once

#include <vector>

#include "config.h"
#include "grads.h"
#include "ops.h"
#include "saved.h"

namespace usp {

/// What a pass over one micro-batch is about. Dimensions in this file: B samples, S positions each,
/// T = B S tokens, H hidden_size, N heads, G kv heads, D head_dim, F ffn_hidden_size, V vocab_size.
struct Pass {
  int64_t num_samples = 0;  ///< B
  Positions positions;      ///< of the S tokens of every sample
  Tensor tokens;            ///< [T] i32
  Tensor targets;           ///< [T] i32; undefined where only logits are wanted
  double loss_scale = 0;  ///< 1 / target tokens of the global batch: the loss is divided here, once
  Tensor loss;            ///< [1] f64, to which the head adds
};

/// A piece of the model that a schedule runs as a unit: the attention half of a block, its MLP, the
/// embedding, the head.
class Segment {
 public:
  virtual ~Segment() = default;
  /// x [T, H] -> y [T, H]; fills `saved`.
  virtual Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) = 0;
  /// dy [T, H] -> dx [T, H]; hands weight gradients to `grads`. `saved` may be consumed.
  virtual Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) = 0;
};

/// y = x Wᵀ, no bias. W [O, I] may be several parameters stacked (q, k and v): one matmul serves
/// them all. The only place where a weight meets a matmul.
class Linear {
 public:
  struct Saved {
    Tensor x;  ///< [T, I]
  };

  explicit Linear(std::vector<Parameter*> weights);

  Tensor forward(const Tensor& x, Saved& saved) const;                  ///< [T, I] -> [T, O]
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads) const;  ///< [T, O] -> [T, I]

 private:
  std::vector<Parameter*> weights_;
};

/// y = x / sqrt(mean(x²) + eps) * weight, per token. Zhang & Sennrich (2019).
class RmsNorm {
 public:
  struct Saved {
    Tensor x;     ///< [T, H]
    Tensor rstd;  ///< [T]
  };

  RmsNorm(Parameter& weight, double eps);

  Tensor forward(const Tensor& x, Saved& saved) const;
  /// `dresidual`: the gradient that reaches x past the norm.
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Tensor& dresidual) const;

 private:
  Parameter* weight_;
  double eps_;
};

/// Cosine and sine of every rotation angle, [positions, D/2]. Su et al. (2021); channel pairs (c, c
/// + D/2), as in Hugging Face's Llama.
struct RopeTable {
  Tensor cos, sin;
  RopeTable(const ModelConfig& config, int64_t positions, DType dtype);
};

/// Tokens to vectors: x[t] = weight[tokens[t]].
class Embedding : public Segment {
 public:
  explicit Embedding(Parameter& weight);
  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) override;  ///< x is not read
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) override;

 private:
  Parameter* weight_;
};

/// The first half of a block: x + o_proj(attention(rope(q), rope(k), v)), q, k, v from norm(x).
class Attention : public Segment {
 public:
  /// Adds the parameters of layer `layer` to the list.
  Attention(ParameterList& parameters, const ModelConfig& config, int64_t layer,
            const RopeTable& rope, bool store_probabilities);
  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) override;

 private:
  struct Kept {
    RmsNorm::Saved norm;
    Linear::Saved qkv_proj, o_proj;
    Tensor qkv;    ///< [B, S, N + 2G, D], rotated
    Tensor lse;    ///< [B, N, S]
    Tensor probs;  ///< [B, N, S, S], if stored
  };

  Tensor q_of(const Tensor& qkv) const { return qkv.narrow(2, 0, heads_); }
  Tensor k_of(const Tensor& qkv) const { return qkv.narrow(2, heads_, kv_heads_); }
  Tensor v_of(const Tensor& qkv) const { return qkv.narrow(2, heads_ + kv_heads_, kv_heads_); }

  int64_t heads_, kv_heads_, head_dim_;
  double scale_;
  RopeTable rope_;
  bool store_probabilities_;
  RmsNorm norm_;
  Linear qkv_proj_, o_proj_;
};

/// The second half of a block: x + down_proj(silu(gate) * up), gate and up from norm(x). Shazeer
/// (2020).
class Mlp : public Segment {
 public:
  Mlp(ParameterList& parameters, const ModelConfig& config, int64_t layer);
  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) override;

 private:
  struct Kept {
    RmsNorm::Saved norm;
    Linear::Saved gate_up_proj, down_proj;
    Tensor gate_up;  ///< [T, 2F]
  };

  int64_t ffn_hidden_size_;
  RmsNorm norm_;
  Linear gate_up_proj_, down_proj_;
};

/// Vectors to the loss: final norm, logits, cross entropy. forward() adds to pass.loss and returns
/// an undefined tensor; backward() starts the chain and reads no dy.
class Head : public Segment {
 public:
  Head(RmsNorm norm, Linear lm_head);
  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) override;
  Tensor logits(const Tensor& x) const;  ///< [T, H] -> [T, V], nothing saved

 private:
  struct Kept {
    RmsNorm::Saved norm;
    Linear::Saved lm_head;
    Tensor logits;  ///< [T, V]
    Tensor lse;     ///< [T]
  };

  RmsNorm norm_;
  Linear lm_head_;
};

}  // namespace usp
