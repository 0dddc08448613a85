#include "layers.h"

#include <cmath>

#include "runtime.h"

namespace usp {

namespace {

/// The parameters' tensors as one: they were added one after the other and lie side by side.
Tensor stacked(const std::vector<Parameter*>& parameters, Tensor Parameter::*member) {
  std::vector<Tensor> parts;
  for (const Parameter* parameter : parameters) parts.push_back(parameter->*member);
  return adjacent(parts);
}

std::string layer_name(int64_t layer, const char* rest) {
  return fmt::format("model.layers.{}.{}", layer, rest);
}

constexpr double kInitStd = 0.02;

/// Each block adds twice to the residual stream; smaller weights there keep its variance from
/// growing with depth. Radford et al. (2019).
double residual_init_std(const ModelConfig& config) {
  return kInitStd / std::sqrt(2.0 * double(config.num_layers));
}

}  // namespace

Linear::Linear(std::vector<Parameter*> weights) : weights_(std::move(weights)) {
  for (Parameter* weight : weights_) ++weight->uses;
}

// [linear]
Tensor Linear::forward(const Tensor& x, Saved& saved) const {
  const Tensor weight = stacked(weights_, &Parameter::value);        // [O, I]
  saved.x = x;                                                       // [T, I]
  Tensor y = Tensor::empty({x.size(0), weight.size(0)}, x.dtype());  // [T, O]
  ops::linear_forward(y, x, weight);
  return y;
}

Tensor Linear::backward(const Tensor& dy, Saved& saved, Grads& grads) const {
  const Tensor weight = stacked(weights_, &Parameter::value);
  Tensor dx = Tensor::empty(saved.x.shape(), dy.dtype());
  ops::linear_backward_input(dx, dy, weight);
  // The closure owns what it reads: whoever receives it may run it later.
  grads.add(weights_, [this, dy, x = saved.x](bool accumulate) {
    ops::linear_backward_weight(stacked(weights_, &Parameter::grad), dy, x, accumulate);
  });
  return dx;
}
// [linear]

RmsNorm::RmsNorm(Parameter& weight, double eps) : weight_(&weight), eps_(eps) { ++weight.uses; }

Tensor RmsNorm::forward(const Tensor& x, Saved& saved) const {
  saved.x = x;
  saved.rstd = Tensor::empty({x.size(0)}, accumulate_dtype(x.dtype()));
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  ops::rmsnorm_forward(y, saved.rstd, x, weight_->value, eps_);
  return y;
}

Tensor RmsNorm::backward(const Tensor& dy, Saved& saved, Grads& grads,
                         const Tensor& dresidual) const {
  Tensor dx = Tensor::empty(dy.shape(), dy.dtype());
  ops::rmsnorm_backward_input(dx, dy, saved.x, weight_->value, saved.rstd, dresidual);
  grads.add({{weight_}}, [this, dy, saved](bool accumulate) {
    ops::rmsnorm_backward_weight(weight_->grad, dy, saved.x, saved.rstd, accumulate);
  });
  return dx;
}

// [rope]
RopeTable::RopeTable(const ModelConfig& config, int64_t positions, DType dtype) {
  const CategoryScope scope(Category::workspace);
  const int64_t pairs = config.head_dim() / 2;
  std::vector<double> cosines(positions * pairs), sines(positions * pairs);
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t c = 0; c < pairs; ++c) {
      const double frequency =
          std::pow(config.rope_theta, -2.0 * double(c) / double(config.head_dim()));
      cosines[p * pairs + c] = std::cos(double(p) * frequency);
      sines[p * pairs + c] = std::sin(double(p) * frequency);
    }
  }
  cos = Tensor::from_host(cosines, {positions, pairs}, accumulate_dtype(dtype));
  sin = Tensor::from_host(sines, {positions, pairs}, accumulate_dtype(dtype));
}
// [rope]

Embedding::Embedding(Parameter& weight) : weight_(&weight) { ++weight.uses; }

Tensor Embedding::forward(const Tensor&, Saved&, const Pass& pass) {
  const Tensor& weight = weight_->value;  // [V, H]
  Tensor y = Tensor::empty({pass.tokens.numel(), weight.size(1)}, weight.dtype());
  ops::embedding_forward(y, weight, pass.tokens);
  return y;
}

Tensor Embedding::backward(const Tensor& dy, Saved&, Grads& grads, const Pass& pass) {
  grads.add({{weight_}}, [this, dy, tokens = pass.tokens](bool accumulate) {
    ops::embedding_backward(weight_->grad, dy, tokens, /*vocab_offset=*/0, accumulate);
  });
  return {};
}

// [attention_init]
Attention::Attention(ParameterList& parameters, const ModelConfig& config, int64_t layer,
                     const RopeTable& rope, bool store_probabilities)
    : heads_(config.num_heads),
      kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim()),
      scale_(1 / std::sqrt(double(head_dim_))),
      rope_(rope),
      store_probabilities_(store_probabilities),
      norm_(parameters.add(layer_name(layer, "input_layernorm.weight"), {config.hidden_size}, 0),
            config.rms_norm_eps),
      qkv_proj_({&parameters.add(layer_name(layer, "self_attn.q_proj.weight"),
                                 {heads_ * head_dim_, config.hidden_size}, kInitStd),
                 &parameters.add(layer_name(layer, "self_attn.k_proj.weight"),
                                 {kv_heads_ * head_dim_, config.hidden_size}, kInitStd),
                 &parameters.add(layer_name(layer, "self_attn.v_proj.weight"),
                                 {kv_heads_ * head_dim_, config.hidden_size}, kInitStd)}),
      o_proj_(
          {&parameters.add(layer_name(layer, "self_attn.o_proj.weight"),
                           {config.hidden_size, heads_ * head_dim_}, residual_init_std(config))}) {}
// [attention_init]

// [attention_forward]
Tensor Attention::forward(const Tensor& x, Saved& saved, const Pass& pass) {
  Kept& kept = saved.emplace<Kept>();
  const int64_t B = pass.num_samples, S = pass.positions.count();
  const Tensor normed = norm_.forward(x, kept.norm);            // [T, H]
  const Tensor qkv = qkv_proj_.forward(normed, kept.qkv_proj);  // [T, (N + 2G) D]
  kept.qkv = qkv.view({B, S, heads_ + 2 * kv_heads_, head_dim_});
  const Tensor q_and_k = kept.qkv.narrow(2, 0, heads_ + kv_heads_);
  ops::rope(q_and_k, rope_.cos, rope_.sin, pass.positions, /*inverse=*/false);

  Tensor out = Tensor::empty({B, S, heads_, head_dim_}, x.dtype());
  kept.lse = Tensor::empty({B, heads_, S}, accumulate_dtype(x.dtype()));
  if (store_probabilities_) kept.probs = Tensor::empty({B, heads_, S, S}, x.dtype());
  ops::attention_forward(out, kept.lse, kept.probs, q_of(kept.qkv), k_of(kept.qkv), v_of(kept.qkv),
                         scale_, pass.positions, pass.positions);

  Tensor y = o_proj_.forward(out.view({B * S, heads_ * head_dim_}), kept.o_proj);  // [T, H]
  ops::add(y, x, y);
  return y;
}
// [attention_forward]

// [attention_backward]
Tensor Attention::backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) {
  Kept& kept = saved.get<Kept>();
  const int64_t B = pass.num_samples, S = pass.positions.count();
  const Shape out_shape{B, S, heads_, head_dim_};
  const DType acc = accumulate_dtype(dy.dtype());
  const Tensor out = kept.o_proj.x.view(out_shape);
  const Tensor dout = o_proj_.backward(dy, kept.o_proj, grads).view(out_shape);
  Tensor delta = Tensor::empty(kept.lse.shape(), acc);  // [B, N, S]
  ops::attention_delta(delta, dout, out);

  Tensor dqkv = Tensor::empty(kept.qkv.shape(), acc);  // [B, S, N + 2G, D]
  ops::fill(dqkv, 0);
  ops::attention_backward(q_of(dqkv), k_of(dqkv), v_of(dqkv), dout, kept.probs, q_of(kept.qkv),
                          k_of(kept.qkv), v_of(kept.qkv), kept.lse, delta, scale_, pass.positions,
                          pass.positions);
  const Tensor dq_and_dk = dqkv.narrow(2, 0, heads_ + kv_heads_);
  ops::rope(dq_and_dk, rope_.cos, rope_.sin, pass.positions, /*inverse=*/true);
  if (acc != dy.dtype()) {
    Tensor rounded = Tensor::empty(dqkv.shape(), dy.dtype());
    ops::copy(rounded, dqkv);
    dqkv = rounded;
  }

  const Tensor dqkv_2d = dqkv.view({B * S, (heads_ + 2 * kv_heads_) * head_dim_});
  const Tensor dnormed = qkv_proj_.backward(dqkv_2d, kept.qkv_proj, grads);
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/dy);
}
// [attention_backward]

// [mlp_init]
Mlp::Mlp(ParameterList& parameters, const ModelConfig& config, int64_t layer)
    : ffn_hidden_size_(config.ffn_hidden_size),
      norm_(parameters.add(layer_name(layer, "post_attention_layernorm.weight"),
                           {config.hidden_size}, 0),
            config.rms_norm_eps),
      gate_up_proj_({&parameters.add(layer_name(layer, "mlp.gate_proj.weight"),
                                     {ffn_hidden_size_, config.hidden_size}, kInitStd),
                     &parameters.add(layer_name(layer, "mlp.up_proj.weight"),
                                     {ffn_hidden_size_, config.hidden_size}, kInitStd)}),
      down_proj_(
          {&parameters.add(layer_name(layer, "mlp.down_proj.weight"),
                           {config.hidden_size, ffn_hidden_size_}, residual_init_std(config))}) {}
// [mlp_init]

// [mlp]
Tensor Mlp::forward(const Tensor& x, Saved& saved, const Pass&) {
  Kept& kept = saved.emplace<Kept>();
  const Tensor normed = norm_.forward(x, kept.norm);                        // [T, H]
  kept.gate_up = gate_up_proj_.forward(normed, kept.gate_up_proj);          // [T, 2F]
  Tensor hidden = Tensor::empty({x.size(0), ffn_hidden_size_}, x.dtype());  // [T, F]
  ops::swiglu_forward(hidden, kept.gate_up);
  Tensor y = down_proj_.forward(hidden, kept.down_proj);  // [T, H]
  ops::add(y, x, y);
  return y;
}

Tensor Mlp::backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass&) {
  Kept& kept = saved.get<Kept>();
  const Tensor dhidden = down_proj_.backward(dy, kept.down_proj, grads);  // [T, F]
  Tensor dgate_up = kept.gate_up;  // [T, 2F]: read here for the last time, so overwritten
  ops::swiglu_backward(dgate_up, dhidden, kept.gate_up);
  const Tensor dnormed = gate_up_proj_.backward(dgate_up, kept.gate_up_proj, grads);
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/dy);
}
// [mlp]

Head::Head(RmsNorm norm, Linear lm_head) : norm_(norm), lm_head_(std::move(lm_head)) {}

// [loss]
Tensor Head::forward(const Tensor& x, Saved& saved, const Pass& pass) {
  Kept& kept = saved.emplace<Kept>();
  kept.logits = lm_head_.forward(norm_.forward(x, kept.norm), kept.lm_head);  // [T, V]
  const Shape rows{x.size(0)};
  const DType acc = accumulate_dtype(x.dtype());
  Tensor row_max = Tensor::empty(rows, acc), row_sum = Tensor::empty(rows, acc);
  Tensor target_logit = Tensor::empty(rows, acc);
  kept.lse = Tensor::empty(rows, acc);
  ops::cross_entropy_forward(row_max, row_sum, target_logit, kept.logits, pass.targets);
  ops::cross_entropy_loss(pass.loss, kept.lse, row_max, row_sum, target_logit, pass.loss_scale);
  return {};
}

Tensor Head::backward(const Tensor&, Saved& saved, Grads& grads, const Pass& pass) {
  Kept& kept = saved.get<Kept>();
  Tensor dlogits = kept.logits;  // [T, V]: the largest tensor of all, overwritten
  ops::cross_entropy_backward(dlogits, kept.logits, pass.targets, kept.lse, /*vocab_offset=*/0,
                              pass.loss_scale);
  const Tensor dnormed = lm_head_.backward(dlogits, kept.lm_head, grads);
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/{});
}
// [loss]

Tensor Head::logits(const Tensor& x) const {
  RmsNorm::Saved norm;
  Linear::Saved lm_head;
  return lm_head_.forward(norm_.forward(x, norm), lm_head);
}

}  // namespace usp
