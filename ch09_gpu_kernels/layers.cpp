#include "layers.h"

#include <cmath>

#include "tensor/fused_ops.h"
#include "tensor/runtime.h"

namespace usp {

Linear::Linear(std::vector<Parameter*> weights, std::string_view output_name)
    : weights_(std::move(weights)), output_name_(output_name) {
  for (Parameter* weight : weights_) ++weight->uses;
}

Tensor Linear::forward(const Tensor& x, Saved& saved, const Pass&) const {
  saved = keep(x);
  return output(saved, /*residual=*/{});
}

Tensor Linear::forward_onto(const Tensor& residual, const Tensor& x, Saved& saved,
                            const Pass&) const {
  saved = keep(x);
  return output(saved, residual);
}

Tensor Linear::backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass&) const {
  Tensor dx = input_gradient(dy);
  add_weight_gradient(dy, saved, grads);
  return dx;
}

// [linear]
Tensor Linear::output(const Saved& saved, const Tensor& residual) const {
  const Tensor w = weight();
  Tensor y = Tensor::empty({saved.x.size(0), w.size(0)}, saved.x.dtype(), output_name_);  // [T, O]
  ops::linear_forward(y, saved.x, w, residual);
  return y;
}

Tensor Linear::input_gradient(const Tensor& dy) const {
  const Tensor w = weight();
  Tensor dx = Tensor::empty({dy.size(0), w.size(1)}, dy.dtype());  // [T, I]
  ops::linear_backward_input(dx, dy, w);
  return dx;
}

void Linear::weight_gradient(const Tensor& dy, const Saved& saved, bool accumulate) const {
  ops::linear_backward_weight(weight_grad(), dy, saved.x, accumulate);
}

void Linear::add_weight_gradient(const Tensor& dy, const Saved& saved, Grads& grads) const {
  // The closure owns what it reads: whoever receives it may run it later.
  grads.add(weights_,
            [this, dy, saved](bool accumulate) { weight_gradient(dy, saved, accumulate); });
}
// [linear]

Footprint Linear::footprint(const PassShape& shape) const {
  int64_t O = 0;
  for (const Parameter* weight : weights_) O += weight->local_shape()[0];
  return {.output = {output_name_, shape.tokens() * O * shape.own()}};
}

// [rms_norm]
Tensor RmsNorm::forward(const Tensor& x, Saved& saved) const {
  saved.x = x;
  saved.rstd = Tensor::empty({x.size(0)}, accumulate_dtype(x.dtype()), "rstd");
  Tensor y = Tensor::empty(x.shape(), x.dtype(), "norm");
  ops::rmsnorm_forward(y, saved.rstd, x, weight_->value, eps_);
  return y;
}

Tensor RmsNorm::backward(const Tensor& dy, Saved& saved, Grads& grads,
                         const Tensor& dresidual) const {
  Tensor dx = Tensor::empty(dy.shape(), dy.dtype());
  ops::rmsnorm_backward_input(dx, dy, saved.x, weight_->value, saved.rstd, dresidual);
  grads.add({weight_}, [this, dy, saved](bool accumulate) {
    ops::rmsnorm_backward_weight(weight_->grad, dy, saved.x, saved.rstd, accumulate);
  });
  return dx;
}
// [rms_norm]

Footprint RmsNorm::footprint(const PassShape& shape) const {
  const int64_t y = shape.rows() * weight_->local_shape()[0] * shape.own();
  return {.kept = {{"rstd", shape.rows() * shape.acc()}}, .output = {"norm", y}};
}

Tensor Embedding::forward(const Tensor&, BlockSaved&, const Pass& pass) {
  const Tensor& weight = weight_->value;  // [V, H]
  Tensor y = Tensor::empty({pass.tokens.numel(), weight.size(1)}, weight.dtype(), "residual");
  ops::embedding_forward(y, weight, pass.tokens, weight_->offset(0));
  return y;
}

Tensor Embedding::backward(const Tensor& dy, BlockSaved&, Grads& grads, const Pass& pass) {
  grads.add({weight_}, [this, dy, tokens = pass.tokens](bool accumulate) {
    ops::embedding_backward(weight_->grad, dy, tokens, weight_->offset(0), accumulate);
  });
  return {};
}

Footprint Embedding::footprint(const PassShape& shape) const {
  return {.output = {"residual", shape.tokens() * weight_->local_shape()[1] * shape.own()}};
}

CoreAttention::CoreAttention(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                             Probabilities probabilities)
    : heads_(num_heads),
      kv_heads_(num_kv_heads),
      head_dim_(head_dim),
      scale_(1 / std::sqrt(double(head_dim))),
      probabilities_(probabilities) {}

Tensor CoreAttention::forward(Tensor qkv, Saved& saved, const Pass& pass) const {
  const int64_t B = qkv.size(0), S = qkv.size(1);
  saved.qkv = qkv;
  saved.out = Tensor::empty({B, S, heads_, head_dim_}, qkv.dtype(), "attention");
  saved.lse = Tensor::empty({B, heads_, S}, accumulate_dtype(qkv.dtype()), "lse");
  const Tensor probs = attend(saved.out, saved.lse, qkv, pass);
  if (probabilities_ == Probabilities::stored) saved.probs = probs;
  return saved.out;
}

Tensor CoreAttention::attend(const Tensor& out, const Tensor& lse, const Tensor& qkv,
                             const Pass& pass) const {
  Tensor kv = kv_of(qkv);  // [B, keys, 2G, D]
  Positions keys = pass.positions;
  if (pass.kv_cache != nullptr) {
    kv = pass.kv_cache->append(this, kv, pass.positions);
    keys = Positions(0, kv.size(1));
  }
  Tensor probs;
  if (probabilities_ != Probabilities::never_whole) {
    probs = Tensor::empty({qkv.size(0), heads_, qkv.size(1), keys.count()}, qkv.dtype(),
                          "probabilities");
  }
  ops::attention_forward(out, lse, probs, q_of(qkv), kv.narrow(2, 0, kv_heads_),
                         kv.narrow(2, kv_heads_, kv_heads_), scale_, pass.positions, keys,
                         pass.documents);
  return probs;
}

// [core_attention]
Tensor CoreAttention::backward(const Tensor& dout, Saved& saved, const Pass& pass,
                               DType dtype) const {
  const Tensor& qkv = saved.qkv;
  if (probabilities_ == Probabilities::recomputed) {
    const RecomputeScope again;
    saved.probs = attend(saved.out, saved.lse, qkv, pass);  // the same bits as in forward
  }
  Tensor delta = Tensor::empty(saved.lse.shape(), saved.lse.dtype());  // [B, N, S]
  ops::attention_delta(delta, dout, saved.out);
  Tensor dqkv = Tensor::empty(qkv.shape(), dtype);  // [B, S, N + 2G, D]
  ops::attention_backward(q_of(dqkv), k_of(dqkv), v_of(dqkv), dout, saved.probs, q_of(qkv),
                          k_of(qkv), v_of(qkv), saved.lse, delta, scale_, pass.positions,
                          pass.positions, /*accumulate=*/false, pass.documents);
  return dqkv;
}
// [core_attention]

// [core_footprint]
Footprint CoreAttention::footprint(const PassShape& shape) const {
  const int64_t B = shape.num_samples, S = shape.seq_len, T = shape.tokens();
  const int64_t out = T * heads_ * head_dim_ * shape.own(), lse = T * heads_ * shape.acc();
  const int64_t qkv = T * (heads_ + 2 * kv_heads_) * head_dim_ * shape.own();
  Footprint result{.kept = {{"qkv", qkv}, {"attention", out}, {"lse", lse}}};
  if (probabilities_ == Probabilities::stored) {
    result.kept.push_back({"probabilities", B * heads_ * S * S * shape.own()});
  }
  return result;
}
// [core_footprint]

Attention::Attention(RmsNorm norm, std::unique_ptr<Linear> qkv_proj, const RopeTable& rope,
                     std::unique_ptr<CoreAttention> core, std::unique_ptr<Linear> o_proj)
    : norm_(norm),
      qkv_proj_(std::move(qkv_proj)),
      rope_(rope),
      core_(std::move(core)),
      o_proj_(std::move(o_proj)) {}

// [attention_forward]
Tensor Attention::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  // [attended]
  if (saved.has<CoreAttention::Saved>()) kept.core = saved.take<CoreAttention::Saved>();
  // [attended]
  const int64_t B = pass.num_samples, S = pass.positions.count();
  const int64_t N = core_->num_heads(), G = core_->num_kv_heads(), D = core_->head_dim();
  const Tensor normed = norm_.forward(x, kept.norm);  // [T, H]
  Tensor qkv = qkv_proj_->forward(normed, kept.qkv_proj, pass).view({B, S, N + 2 * G, D});
  ops::rope(qkv.narrow(2, 0, N + G), rope_.cos, rope_.sin, pass.positions, /*inverse=*/false);
  const Tensor out = core_->forward(std::move(qkv), kept.core, pass);            // [B, S, N, D]
  return o_proj_->forward_onto(x, out.view({B * S, N * D}), kept.o_proj, pass);  // [T, H]
}
// [attention_forward]

// [keep]
void Attention::keep_through_recompute(BlockSaved& saved, BlockSaved& kept) const {
  if (!core_->keeps_through_recompute()) return;
  const CoreAttention::Saved& core = saved.get<Saved>().core;
  kept.emplace<CoreAttention::Saved>() = {{}, core.out, core.lse, {}};
}
// [keep]

// [attention_backward]
Tensor Attention::backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const int64_t B = pass.num_samples, S = pass.positions.count();
  const int64_t N = core_->num_heads(), G = core_->num_kv_heads(), D = core_->head_dim();
  const Tensor dout = o_proj_->backward(dy, kept.o_proj, grads, pass).view({B, S, N, D});
  const Tensor dqkv = core_->backward(dout, kept.core, pass, dy.dtype());  // [B, S, N + 2G, D]
  ops::rope(dqkv.narrow(2, 0, N + G), rope_.cos, rope_.sin, pass.positions, /*inverse=*/true);
  const Tensor dqkv_2d = dqkv.view({B * S, (N + 2 * G) * D});
  const Tensor dnormed = qkv_proj_->backward(dqkv_2d, kept.qkv_proj, grads, pass);
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/dy);
}
// [attention_backward]

// [attention_footprint]
Footprint Attention::footprint(const PassShape& shape) const {
  const Footprint norm = norm_.footprint(shape), qkv = qkv_proj_->footprint(shape);
  const Footprint core = core_->footprint(shape);
  Footprint result{.output = o_proj_->footprint(shape).output};
  result.keep(norm.kept, qkv.keeps_x ? norm.output : NamedBytes{});
  result.keep(qkv.kept);
  result.keep(core.kept);
  // [kept_through_recompute]
  result.kept_through_recompute = core.kept_through_recompute;
  // [kept_through_recompute]
  return result;
}
// [attention_footprint]

Tensor FeedForward::forward(const Tensor& x, Saved& saved, const Pass& pass,
                            const Tensor& residual) const {
  saved.gate_up = gate_up_proj_->forward(x, saved.gate_up_proj, pass);  // [T, 2F]
  const Tensor& gate_up = saved.gate_up;
  Tensor hidden =
      Tensor::empty({gate_up.size(0), gate_up.size(1) / 2}, x.dtype(), "swiglu");  // [T, F]
  ops::swiglu_forward(hidden, gate_up);
  // [drop_product]
  const Tensor y = down_proj_->forward_onto(residual, hidden, saved.down_proj, pass);  // [T, H]
  if (fused_) saved.down_proj = {};
  return y;
  // [drop_product]
}

Tensor FeedForward::backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) const {
  // [product_again]
  if (fused_) saved.down_proj.x = ops::swiglu_again(saved.gate_up);
  // [product_again]
  const Tensor dhidden = down_proj_->backward(dy, saved.down_proj, grads, pass);  // [T, F]
  Tensor dgate_up = saved.gate_up;  // [T, 2F]: read here for the last time, so overwritten
  ops::swiglu_backward(dgate_up, dhidden, saved.gate_up);
  // [free_product]
  if (fused_) saved.down_proj = {};
  // [free_product]
  return gate_up_proj_->backward(dgate_up, saved.gate_up_proj, grads, pass);  // [T, H]
}

Tensor Mlp::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  const Tensor normed = norm_.forward(x, kept.norm);  // [T, H]
  return feed_forward_.forward(normed, kept.feed_forward, pass, /*residual=*/x);
}

Tensor Mlp::backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const Tensor dnormed = feed_forward_.backward(dy, kept.feed_forward, grads, pass);
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/dy);
}

Footprint FeedForward::footprint(const PassShape& shape) const {
  const Footprint gate_up = gate_up_proj_->footprint(shape), down = down_proj_->footprint(shape);
  Footprint result{.output = down.output, .keeps_x = gate_up.keeps_x};
  result.keep(gate_up.kept, gate_up.output);
  // [kept_product]
  result.keep(down.kept, fused_ ? NamedBytes{} : NamedBytes{"swiglu", gate_up.output.bytes / 2});
  // [kept_product]
  return result;
}

Footprint Mlp::footprint(const PassShape& shape) const {
  const Footprint norm = norm_.footprint(shape), inner = feed_forward_.footprint(shape);
  Footprint result{.output = inner.output};
  result.keep(norm.kept, inner.keeps_x ? norm.output : NamedBytes{});
  result.keep(inner.kept);
  return result;
}

// [loss]
void CrossEntropy::forward(const Tensor& logits, Saved& saved, const Pass& pass) const {
  saved.logits = logits;  // [T, V]
  saved.lse = add_loss(pass.loss, rows_of(logits, pass), pass);
}

Tensor CrossEntropy::backward(Saved& saved, const Pass& pass) const {
  Tensor dlogits = saved.logits;  // [T, V]: the largest tensor of all, overwritten
  ops::cross_entropy_backward(dlogits, saved.logits, pass.targets, saved.lse, vocab_offset_,
                              pass.loss_scale);
  return dlogits;
}
// [loss]

CrossEntropy::Rows CrossEntropy::rows_of(const Tensor& logits, const Pass& pass) const {
  const Shape shape{logits.size(0)};
  const DType acc = accumulate_dtype(logits.dtype());
  Rows rows{Tensor::empty(shape, acc), Tensor::empty(shape, acc), Tensor::empty(shape, acc)};
  ops::cross_entropy_forward(rows.max, rows.sum, rows.target_logit, logits, pass.targets,
                             vocab_offset_);
  return rows;
}

Tensor CrossEntropy::add_loss(const Tensor& loss, const Rows& rows, const Pass& pass) const {
  Tensor lse = Tensor::empty(rows.max.shape(), rows.max.dtype(), "lse");
  ops::cross_entropy_loss(loss, lse, rows.max, rows.sum, rows.target_logit, pass.loss_scale);
  return lse;
}

Footprint CrossEntropy::footprint(const PassShape& shape) const {
  return {.kept = {{"lse", shape.tokens() * shape.acc()}}};
}

Head::Head(RmsNorm norm, std::unique_ptr<Linear> lm_head,
           std::unique_ptr<CrossEntropy> cross_entropy)
    : norm_(norm), lm_head_(std::move(lm_head)), cross_entropy_(std::move(cross_entropy)) {}

Tensor Head::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  const Tensor logits = lm_head_->forward(norm_.forward(x, kept.norm), kept.lm_head, pass);
  cross_entropy_->forward(logits, kept.cross_entropy, pass);
  return {};
}

Tensor Head::backward(const Tensor&, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const Tensor dlogits = cross_entropy_->backward(kept.cross_entropy, pass);
  const Tensor dnormed = lm_head_->backward(dlogits, kept.lm_head, grads, pass);
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/{});
}

Footprint Head::footprint(const PassShape& shape) const {
  const Footprint norm = norm_.footprint(shape), lm_head = lm_head_->footprint(shape);
  Footprint result;
  result.keep(norm.kept, lm_head.keeps_x ? norm.output : NamedBytes{});
  result.keep(lm_head.kept, lm_head.output);
  result.keep(cross_entropy_->footprint(shape).kept);
  return result;
}

Tensor Head::logits(const Tensor& x, const Pass& pass) const {
  RmsNorm::Saved norm;
  Linear::Saved lm_head;
  return lm_head_->forward(norm_.forward(x, norm), lm_head, pass);
}

}  // namespace usp
