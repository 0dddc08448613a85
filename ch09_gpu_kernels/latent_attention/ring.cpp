#include "latent_attention/ring.h"

#include <functional>
#include <optional>

#include "tensor/recorder.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// [B, S', 1, W] -> [T, C]
Tensor compressed(const Tensor& latents, int64_t C) {
  const int64_t W = latents.size(3);
  return latents.view({latents.numel() / W, W}).narrow(1, 0, C);
}

}  // namespace

void spread_heads(const Tensor& kv, const Tensor& expanded, const Tensor& k_rope,
                  const MlaShape& shape) {
  const int64_t N = expanded.size(2), nope = shape.qk_nope_head_dim, V = shape.v_head_dim;
  ops::copy(kv.narrow(2, 0, N).narrow(3, 0, nope), expanded.narrow(3, 0, nope));
  ops::copy(kv.narrow(2, N, N).narrow(3, 0, V), expanded.narrow(3, nope, V));
  for (int64_t head = 0; head < N; ++head) {
    ops::copy(kv.narrow(2, head, 1).narrow(3, nope, shape.qk_rope_head_dim), k_rope);
  }
}

Tensor gather_heads(const Tensor& dkv, DType dtype, const MlaShape& shape) {
  const int64_t B = dkv.size(0), S = dkv.size(1), N = dkv.size(2) / 2;
  const int64_t nope = shape.qk_nope_head_dim, V = shape.v_head_dim;
  const Tensor dexpanded = Tensor::empty({B, S, N, nope + V}, dtype);
  ops::copy(dexpanded.narrow(3, 0, nope), dkv.narrow(2, 0, N).narrow(3, 0, nope));
  ops::copy(dexpanded.narrow(3, nope, V), dkv.narrow(2, N, N).narrow(3, 0, V));
  return dexpanded;
}

Tensor shared_key_gradient(const Tensor& dkv, DType acc, const MlaShape& shape) {
  const int64_t B = dkv.size(0), S = dkv.size(1), N = dkv.size(2) / 2;
  const int64_t nope = shape.qk_nope_head_dim, rope = shape.qk_rope_head_dim;
  const RecordedPhase adds_heads("sums over heads");
  const Tensor sum = Tensor::zeros({B, S, 1, rope}, acc), of_head = Tensor::empty(sum.shape(), acc);
  for (int64_t head = 0; head < N; ++head) {
    ops::copy(of_head, dkv.narrow(2, head, 1).narrow(3, nope, rope));
    ops::accumulate(sum, of_head);
  }
  return sum;
}

Tensor LatentExpansion::expand(const Tensor& latents) const {
  const int64_t B = latents.size(0), S = latents.size(1), C = shape_.kv_lora_rank;
  const DType dtype = latents.dtype();
  const Tensor kv = Tensor::zeros(heads_shape(latents), dtype);
  const Tensor expanded = Tensor::empty({B * S, rows()}, dtype, "kv");
  ops::linear_forward(expanded, compressed(latents, C), kv_b_->value);
  spread_heads(kv, expanded.view({B, S, heads_, rows() / heads_}),
               latents.narrow(3, C, shape_.qk_rope_head_dim), shape_);
  return kv;
}

void LatentExpansion::backward(const Tensor& dlatents, const Tensor& weight_sum, const Tensor& dkv,
                               const Tensor& latents) const {
  const int64_t T = latents.size(0) * latents.size(1), C = shape_.kv_lora_rank;
  ops::copy(dlatents.narrow(3, C, shape_.qk_rope_head_dim),
            shared_key_gradient(dkv, dkv.dtype(), shape_));
  const Tensor dexpanded = gather_heads(dkv, latents.dtype(), shape_).view({T, rows()});
  ops::linear_backward_input(compressed(dlatents, C), dexpanded, kv_b_->value);
  ops::linear_backward_weight(weight_sum, dexpanded, compressed(latents, C), /*accumulate=*/true);
}

Tensor LatentExpansion::weight_sum(DType acc) const {
  return Tensor::zeros({rows(), shape_.kv_lora_rank}, acc);
}

void LatentExpansion::add_weight_gradient(const Tensor& weight_sum, Grads& grads) const {
  grads.add({kv_b_}, [weight = kv_b_, weight_sum](bool accumulate) {
    if (accumulate) ops::accumulate(weight_sum, weight->grad);
    ops::copy(weight->grad, weight_sum);  // rounded once, where gradients are kept in bf16
  });
}

namespace {

/// Whether a step's block is read here.
using Reads = std::function<bool(int step)>;

/// Keys and values made of latents when those arrive.
class ExpandedKeys : public KeyExchange {
 public:
  /// `made_before`: in forward.
  ExpandedKeys(const ContextGroup& group, Tensor own, const LatentExpansion& expansion, Reads reads,
               bool made_before)
      : latents_(exchange_keys(group, std::move(own))),
        expansion_(expansion),
        reads_(std::move(reads)),
        made_before_(made_before) {}

  Tensor next() override {
    here_ = latents_->next();
    ++step_;
    if (!reads_here()) return {};
    std::optional<RecomputeScope> again;  // another place's block is made there too
    if (made_before_ || step_ > 0) again.emplace();
    return expansion_.expand(here_);
  }

  const Tensor& here() const { return here_; }  ///< the step's latents [B, S', 1, C + rope]
  int step() const { return step_; }
  bool reads_here() const { return reads_(step_); }

 private:
  std::unique_ptr<KeyExchange> latents_;
  const LatentExpansion& expansion_;
  Reads reads_;
  bool made_before_;
  Tensor here_;
  int step_ = -1;
};

/// A step's gradient of keys and values becomes one of latents before it is passed on.
class CompressedGradients : public GradientExchange {
 public:
  /// `own`: this rank's latents.
  CompressedGradients(const ContextGroup& group, const Tensor& own, const ExpandedKeys& keys,
                      const LatentExpansion& expansion)
      : latents_(exchange_gradients(group, own.shape(), accumulate_dtype(own.dtype()))),
        keys_(keys),
        expansion_(expansion),
        weight_sum_(expansion.weight_sum(accumulate_dtype(own.dtype()))) {}

  Tensor share() override {
    dlatents_ = latents_->share();
    if (!keys_.reads_here()) return {};
    return Tensor::zeros(expansion_.heads_shape(dlatents_), dlatents_.dtype());
  }
  void pass_on(const Tensor& dkv) override {
    if (keys_.reads_here()) {
      std::optional<RecomputeScope> again;
      if (keys_.step() > 0) again.emplace();
      expansion_.backward(dlatents_, weight_sum_, dkv, keys_.here());
    }
    latents_->pass_on(dlatents_);
    dlatents_ = {};
  }
  Tensor own() override { return latents_->own(); }
  const Tensor& weight_sum() const { return weight_sum_; }

 private:
  std::unique_ptr<GradientExchange> latents_;
  const ExpandedKeys& keys_;
  const LatentExpansion& expansion_;
  Tensor weight_sum_, dlatents_;
};

}  // namespace

Tensor LatentRing::attend_latents(Tensor q, const Tensor& latents, Saved& saved,
                                  const Pass& pass) const {
  saved.qkv = std::move(q);
  if (saved.out.defined()) return saved.out;  // kept while the rest of the block is recomputed
  const auto reads = [&](int step) { return sees(pass, keys_of_step(step, pass)); };
  ExpandedKeys keys(group(), latents, expansion_, reads, /*made_before=*/false);
  forward_steps(keys, saved, pass);
  return saved.out;
}

LatentRing::Gradients LatentRing::backward_latents(const Tensor& dout, const Tensor& latents,
                                                   Saved& saved, Grads& grads,
                                                   const Pass& pass) const {
  const auto reads = [&](int step) { return sees(pass, keys_of_step(step, pass)); };
  const Tensor dq = Tensor::zeros(saved.qkv.shape(), accumulate_dtype(dout.dtype()));
  std::optional<ExpandedKeys> keys(std::in_place, group(), latents, expansion_, reads,
                                   /*made_before=*/true);
  CompressedGradients gradients(group(), latents, *keys, expansion_);
  backward_steps(dq, dout, *keys, gradients, saved, pass);
  keys.reset();
  expansion_.add_weight_gradient(gradients.weight_sum(), grads);
  return {dq, gradients.own()};
}

Footprint LatentRing::footprint(const PassShape& shape) const {
  Footprint result = RingAttention::footprint(shape);
  result.kept[0] = {"q", shape.tokens() * num_heads() * head_dim() * shape.own()};
  return result;
}

bool passes_latents_on(const ModelConfig& model, const ContextParallelConfig& context) {
  return model.mla.on() && context.cp_size > 1 && context.head_ranks() == 1;
}

double expansion_flops_again(const TrainConfig& config) {
  const ContextParallelConfig& cp = config.context_parallel;
  if (!passes_latents_on(config.model, cp)) return 0;
  int64_t others = -1;  // blocks that the first place reads, beside its own
  const Positions queries = cp.of_ring_place(config.seq_len, 0);
  for (int64_t place = 0; place < cp.ring_size(); ++place) {
    others += queries.end() > cp.of_ring_place(config.seq_len, place)[0];
  }
  int64_t products = others + (others + 1) + 2 * others;  // forward, made again, both gradients
  // A recomputed forward pass has one product for each weight, and here as many as there are
  // blocks.
  if (config.recompute == "full") products += cp.cp_recompute == "keep" ? -1 : others;
  const MlaShape& mla = config.model.mla;
  const int64_t rows = config.model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim);
  return 2 * double(products) * double(rows * mla.kv_lora_rank);
}

}  // namespace usp
