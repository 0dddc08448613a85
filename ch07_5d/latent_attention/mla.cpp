#include "latent_attention/mla.h"

#include "context_parallel/attention.h"
#include "tensor/recorder.h"
#include "tensor/runtime.h"
#include "tensor_parallel/linears.h"

namespace usp {

LatentQuery::LatentQuery(std::unique_ptr<Linear> q_a_proj, std::optional<RmsNorm> norm,
                         std::unique_ptr<Linear> q_b_proj)
    : q_a_proj_(std::move(q_a_proj)), norm_(norm), q_b_proj_(std::move(q_b_proj)) {}

Tensor LatentQuery::forward(const Tensor& x, Saved& saved, const Pass& pass) const {
  if (!q_a_proj_) return q_b_proj_->forward(x, saved.q_b_proj, pass);
  const Tensor c_q = norm_->forward(q_a_proj_->forward(x, saved.q_a_proj, pass), saved.norm);
  return q_b_proj_->forward(c_q, saved.q_b_proj, pass);
}

Tensor LatentQuery::backward(const Tensor& dq, Saved& saved, Grads& grads, const Pass& pass) const {
  Tensor dc = q_b_proj_->backward(dq, saved.q_b_proj, grads, pass);
  if (!q_a_proj_) return dc;
  dc = norm_->backward(dc, saved.norm, grads, /*dresidual=*/{});
  return q_a_proj_->backward(dc, saved.q_a_proj, grads, pass);
}

LatentKeys::LatentKeys(const MlaShape& shape, std::unique_ptr<Linear> kv_a_proj, RmsNorm norm,
                       std::unique_ptr<Linear> kv_b_proj, Parameter& kv_b)
    : shape_(shape),
      kv_a_proj_(std::move(kv_a_proj)),
      norm_(norm),
      kv_b_proj_(std::move(kv_b_proj)),
      kv_b_(&kv_b) {}

// [compress]
LatentKeys::Latent LatentKeys::compress(const Tensor& x, Saved& saved, const Pass& pass) const {
  const int64_t R = x.size(0), C = shape_.kv_lora_rank, rope = shape_.qk_rope_head_dim;
  const Tensor both = kv_a_proj_->forward(x, saved.kv_a_proj, pass);  // [R, C + rope]
  const Tensor c = Tensor::empty({R, C}, x.dtype(), "latent");
  const Tensor k_rope = Tensor::empty({R, rope}, x.dtype());
  ops::copy(c, both.narrow(1, 0, C));
  ops::copy(k_rope, both.narrow(1, C, rope));
  return {norm_.forward(c, saved.norm), k_rope};
}

Tensor LatentKeys::expand(const Tensor& c_kv, Saved& saved, const Pass& pass) const {
  return kv_b_proj_->forward(c_kv, saved.kv_b_proj, pass);
}
// [compress]

Tensor LatentKeys::expand_backward(const Tensor& dkv, Saved& saved, Grads& grads,
                                   const Pass& pass) const {
  return kv_b_proj_->backward(dkv, saved.kv_b_proj, grads, pass);
}

Tensor LatentKeys::norm_backward(const Tensor& dc_kv, Saved& saved, Grads& grads) const {
  return norm_.backward(dc_kv, saved.norm, grads, /*dresidual=*/{});
}

Tensor LatentKeys::compress_backward(const Tensor& dc, Saved& saved, Grads& grads,
                                     const Pass& pass) const {
  return kv_a_proj_->backward(dc, saved.kv_a_proj, grads, pass);
}

Tensor LatentKeys::key_weight(int64_t head) const {
  const int64_t rows = shape_.qk_nope_head_dim + shape_.v_head_dim;
  return kv_b_->value.narrow(0, head * rows, shape_.qk_nope_head_dim);
}

Tensor LatentKeys::value_weight(int64_t head) const {
  const int64_t nope = shape_.qk_nope_head_dim, rows = nope + shape_.v_head_dim;
  return kv_b_->value.narrow(0, head * rows + nope, shape_.v_head_dim);
}

LatentAttention::LatentAttention(const MlaShape& shape, RmsNorm norm, LatentQuery query,
                                 LatentKeys keys, const RopeTable& rope,
                                 std::unique_ptr<CoreAttention> core,
                                 std::unique_ptr<Linear> o_proj, const TensorRegion& region,
                                 const ContextGroup& context)
    : shape_(shape),
      norm_(norm),
      query_(std::move(query)),
      keys_(std::move(keys)),
      rope_(rope),
      core_(std::move(core)),
      ring_(dynamic_cast<const LatentRing*>(core_.get())),
      o_proj_(std::move(o_proj)),
      region_(region),
      context_(context) {}

Tensor LatentAttention::rotated(const Tensor& qkv) const {
  return qkv.narrow(2, 0, core_->num_heads())
      .narrow(3, shape_.qk_nope_head_dim, shape_.qk_rope_head_dim);
}

Tensor LatentAttention::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  if (saved.has<CoreAttention::Saved>()) kept.core = saved.take<CoreAttention::Saved>();
  const Tensor normed = norm_.forward(x, kept.norm);  // [R, H]
  const bool cached = pass.kv_cache != nullptr;
  const Tensor heads = cached ? attend_cached(normed, pass) : attend(normed, kept, pass);
  return o_proj_->forward_onto(x, heads, kept.o_proj, pass);  // [R, H]
}

Tensor LatentAttention::attend(const Tensor& normed, Saved& kept, const Pass& pass) const {
  const int64_t B = pass.num_samples, S = pass.positions.count();
  const int64_t N = core_->num_heads(), D = core_->head_dim(), V = shape_.v_head_dim;
  if (passes_latents_on(pass)) {
    kept.out = attend_over_ring(normed, kept, pass);
  } else {
    Tensor qkv = Tensor::empty({B, S, 3 * N, D}, normed.dtype(), "qkv");
    ops::fill(qkv, 0);  // for the values' padding
    fill_queries(qkv, normed, kept, pass);
    fill_keys(qkv, normed, kept, pass);
    kept.out = core_->forward(std::move(qkv), kept.core, pass);  // [B, S, N, D]
  }
  const Tensor heads = Tensor::empty({B, S, N, V}, normed.dtype(), "attention");
  ops::copy(heads, kept.out.narrow(3, 0, V));
  return heads.view({B * S, N * V});
}

void LatentAttention::fill_queries(const Tensor& qkv, const Tensor& normed, Saved& kept,
                                   const Pass& pass) const {
  const int64_t B = qkv.size(0), S = qkv.size(1), N = core_->num_heads(), D = core_->head_dim();
  const Tensor q = query_.forward(normed, kept.query, pass);
  ops::copy(qkv.narrow(2, 0, N), q.view({B, S, N, D}));
  ops::rope(rotated(qkv), rope_.cos, rope_.sin, pass.positions, /*inverse=*/false);
}

void LatentAttention::fill_keys(const Tensor& qkv, const Tensor& normed, Saved& kept,
                                const Pass& pass) const {
  const int64_t B = qkv.size(0), S = qkv.size(1), N = core_->num_heads();
  const int64_t nope = shape_.qk_nope_head_dim, rope = shape_.qk_rope_head_dim;
  const int64_t V = shape_.v_head_dim;
  const LatentKeys::Latent latent = keys_.compress(normed, kept.keys, pass);
  Pending arriving = region_.enter(latent.k_rope, pass);  // while the latent is expanded
  if (!region_.overlaps()) arriving.wait();
  const Tensor kv = keys_.expand(latent.c_kv, kept.keys, pass).view({B, S, N, nope + V});
  const Tensor k_rope = arriving.wait().view({B, S, 1, rope});
  ops::rope(k_rope, rope_.cos, rope_.sin, pass.positions, /*inverse=*/false);
  spread_heads(qkv.narrow(2, N, 2 * N), kv, k_rope, shape_);
}

Tensor LatentAttention::attend_over_ring(const Tensor& normed, Saved& kept,
                                         const Pass& pass) const {
  const int64_t B = pass.num_samples, S = pass.positions.count();
  kept.latents = joined(keys_.compress(normed, kept.keys, pass));  // [R, C + rope]
  Pending arriving = region_.enter(kept.latents, pass);            // while queries are computed
  if (!region_.overlaps()) arriving.wait();
  const Tensor q =
      query_.forward(normed, kept.query, pass).view({B, S, core_->num_heads(), core_->head_dim()});
  ops::rope(rotated(q), rope_.cos, rope_.sin, pass.positions, /*inverse=*/false);
  const Tensor latents = arriving.wait();  // [T, C + rope]
  if (!region_.gathers_again()) kept.latents = latents;
  return ring_->attend_latents(q, turned(latents, pass), kept.core, pass);
}

Tensor LatentAttention::joined(const LatentKeys::Latent& latent) const {
  const int64_t R = latent.c_kv.size(0), C = shape_.kv_lora_rank, rope = shape_.qk_rope_head_dim;
  const Tensor both = Tensor::empty({R, C + rope}, latent.c_kv.dtype(), "latent");
  ops::copy(both.narrow(1, 0, C), latent.c_kv);
  ops::copy(both.narrow(1, C, rope), latent.k_rope);
  return both;
}

Tensor LatentAttention::turned(const Tensor& latents, const Pass& pass) const {
  const int64_t C = shape_.kv_lora_rank, rope = shape_.qk_rope_head_dim;
  const Tensor by_sample =
      latents.view({pass.num_samples, pass.positions.count(), 1, shape_.cached()});
  ops::rope(by_sample.narrow(3, C, rope), rope_.cos, rope_.sin, pass.positions, /*inverse=*/false);
  return by_sample;
}

Tensor LatentAttention::attend_cached(const Tensor& normed, const Pass& pass) const {
  const int64_t N = core_->num_heads(), C = shape_.kv_lora_rank, W = shape_.cached();
  const int64_t V = shape_.v_head_dim;
  const Tensor q = absorbed_queries(normed, pass);
  const int64_t B = q.size(0), S = q.size(1);
  const bool shares = context_.size() > 1;
  const KvCache::Share share{context_.rank(), context_.size()};
  // [attend_latents]
  const Tensor k = pass.kv_cache->append(this, latents(normed, pass), pass.positions, share);
  const Positions keys(pass.kv_cache->first_position(share), k.size(1));
  const DType acc = accumulate_dtype(q.dtype());
  Tensor out = Tensor::empty({B, S, N, W}, shares ? acc : q.dtype());
  const Tensor lse = Tensor::empty({B, N, S}, acc);
  // Naive: latents are wider than heads, and than what blockwise attention takes on a GPU.
  const Tensor probs = Tensor::empty({B, N, S, keys.count()}, q.dtype());
  ops::attention_forward(out, lse, probs, q, k, /*v=*/k, core_->scale(), pass.positions, keys,
                         pass.documents);
  // [attend_latents]
  if (shares) out = merge_shares(out, lse, q.dtype(), context_.cp());
  const Tensor heads = Tensor::empty({B * S, N * V}, q.dtype());
  const RecordedPhase apart("heads apart");
  // [values_once]
  out = out.view({B * S, N * W});  // of each head's W channels, C are a mean of latents
  for (int64_t head = 0; head < N; ++head) {
    ops::matmul(heads.narrow(1, head * V, V), out.narrow(1, head * W, C),
                keys_.value_weight(head).transposed());
  }
  return heads;
  // [values_once]
}

Tensor LatentAttention::absorbed_queries(const Tensor& normed, const Pass& pass) const {
  const int64_t B = pass.num_samples, S = pass.positions.count(), T = B * S;
  const int64_t N = core_->num_heads(), D = core_->head_dim(), C = shape_.kv_lora_rank;
  const int64_t nope = shape_.qk_nope_head_dim, rope = shape_.qk_rope_head_dim, W = C + rope;
  LatentQuery::Saved dropped;
  const RecordedPhase apart("heads apart");
  // [absorb]
  const Tensor q = query_.forward(normed, dropped, pass);  // [T, N D]
  const Tensor absorbed = Tensor::empty({B, S, N, W}, q.dtype());
  const Tensor rows = absorbed.view({T, N * W});
  for (int64_t head = 0; head < N; ++head) {
    ops::matmul(rows.narrow(1, head * W, C), q.narrow(1, head * D, nope), keys_.key_weight(head));
  }
  const Tensor turned = absorbed.narrow(3, C, rope);
  ops::copy(turned, q.view({B, S, N, D}).narrow(3, nope, rope));
  ops::rope(turned, rope_.cos, rope_.sin, pass.positions, /*inverse=*/false);
  return absorbed;
  // [absorb]
}

Tensor LatentAttention::latents(const Tensor& normed, const Pass& pass) const {
  LatentKeys::Saved dropped;
  return turned(joined(keys_.compress(normed, dropped, pass)), pass);
}

void LatentAttention::keep_through_recompute(BlockSaved& saved, BlockSaved& kept) const {
  if (!core_->keeps_through_recompute()) return;
  const CoreAttention::Saved& core = saved.get<Saved>().core;
  kept.emplace<CoreAttention::Saved>() = {{}, core.out, core.lse, {}};
}

Tensor LatentAttention::backward(const Tensor& dy, BlockSaved& saved, Grads& grads,
                                 const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const int64_t C = shape_.kv_lora_rank, rope = shape_.qk_rope_head_dim;
  const bool over_ring = ring_ != nullptr;
  Projected d = attend_backward(o_proj_->backward(dy, kept.o_proj, grads, pass), kept, grads, pass);
  // Every rank has the gradient through its own heads; what all heads share gets the sum.
  Pending shared = region_.enter_backward(d.shared);  // [R, rope], over a ring [R, C + rope]
  if (!region_.overlaps()) shared.wait();
  const Tensor dnormed = query_.backward(d.dq, kept.query, grads, pass);  // [R, H]
  d.dq = {};
  Tensor dc_kv;  // [R, C]
  if (over_ring) {
    dc_kv = Tensor::empty({dnormed.size(0), C}, dy.dtype());
    ops::copy(dc_kv, shared.wait().narrow(1, 0, C));
  } else {
    dc_kv = keys_.expand_backward(d.dkv, kept.keys, grads, pass);
    d.dkv = {};
  }
  const Tensor dlatent = keys_.norm_backward(dc_kv, kept.keys, grads);
  dc_kv = {};
  const Tensor dc = Tensor::empty({dlatent.size(0), C + rope}, dy.dtype());
  ops::copy(dc.narrow(1, 0, C), dlatent);
  ops::copy(dc.narrow(1, C, rope), shared.wait().narrow(1, over_ring ? C : 0, rope));
  ops::add(dnormed, dnormed, keys_.compress_backward(dc, kept.keys, grads, pass));
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/dy);
}

Tensor LatentAttention::padded(const Tensor& dheads, const Pass& pass) const {
  const int64_t B = pass.num_samples, S = pass.positions.count(), N = core_->num_heads();
  const int64_t V = shape_.v_head_dim;
  const Tensor dout = Tensor::zeros({B, S, N, core_->head_dim()}, dheads.dtype());
  ops::copy(dout.narrow(3, 0, V), dheads.view({B, S, N, V}));
  return dout;
}

LatentAttention::Projected LatentAttention::attend_backward(const Tensor& dheads, Saved& kept,
                                                            Grads& grads, const Pass& pass) const {
  if (ring_ != nullptr) return attend_backward_over_ring(dheads, kept, grads, pass);
  const DType dtype = dheads.dtype();
  Tensor dout = padded(dheads, pass);
  const Tensor dqkv = core_->backward(dout, kept.core, pass, dtype);  // [B, S, 3N, D]
  dout = {};
  const int64_t B = dqkv.size(0), S = dqkv.size(1), N = core_->num_heads(), T = B * S;
  ops::rope(rotated(dqkv), rope_.cos, rope_.sin, pass.positions, /*inverse=*/true);
  const Tensor dq = Tensor::empty({B, S, N, dqkv.size(3)}, dtype);
  ops::copy(dq, dqkv.narrow(2, 0, N));
  const Tensor dkv = dqkv.narrow(2, N, 2 * N), dexpanded = gather_heads(dkv, dtype, shape_);
  const Tensor sum = shared_key_gradient(dkv, accumulate_dtype(dtype), shape_);
  ops::rope(sum, rope_.cos, rope_.sin, pass.positions, /*inverse=*/true);
  const Tensor dk_rope = Tensor::empty({T, shape_.qk_rope_head_dim}, dtype);
  ops::copy(dk_rope, sum.view(dk_rope.shape()));
  return {dq.view({T, dq.numel() / T}), dexpanded.view({T, dexpanded.numel() / T}), dk_rope};
}

LatentAttention::Projected LatentAttention::attend_backward_over_ring(const Tensor& dheads,
                                                                      Saved& kept, Grads& grads,
                                                                      const Pass& pass) const {
  const int64_t B = pass.num_samples, S = pass.positions.count(), T = B * S;
  const int64_t C = shape_.kv_lora_rank, W = shape_.cached();
  Tensor latents = region_.gathers_again() ? turned(region_.gather(kept.latents).wait(), pass)
                                           : kept.latents.view({B, S, 1, W});
  Tensor dout = padded(dheads, pass);
  auto [dq, dlatents] = ring_->backward_latents(dout, latents, kept.core, grads, pass);
  dout = latents = {};
  for (const Tensor& part : {rotated(dq), dlatents.narrow(3, C, shape_.qk_rope_head_dim)}) {
    ops::rope(part, rope_.cos, rope_.sin, pass.positions, /*inverse=*/true);
  }
  dq = in_dtype(dq, dheads.dtype());
  dlatents = in_dtype(dlatents, dheads.dtype());
  return {dq.view({T, dq.numel() / T}), {}, dlatents.view({T, W})};
}

Footprint LatentQuery::footprint(const PassShape& shape) const {
  const Footprint q_b = q_b_proj_->footprint(shape);
  if (!q_a_proj_) return q_b;
  const Footprint norm = norm_->footprint(shape);
  Footprint result{.output = q_b.output};
  result.keep(norm.kept, {"latent", norm.output.bytes});  // before the norm
  result.keep(q_b.kept, q_b.keeps_x ? norm.output : NamedBytes{});
  return result;
}

Footprint LatentKeys::footprint(const PassShape& shape, bool expands) const {
  const Footprint norm = norm_.footprint(shape), kv_b = kv_b_proj_->footprint(shape);
  Footprint result;
  result.keep(norm.kept, {"latent", norm.output.bytes});
  if (expands) result.keep(kv_b.kept, kv_b.keeps_x ? norm.output : NamedBytes{});
  return result;
}

Footprint LatentAttention::footprint(const PassShape& shape) const {
  const Footprint norm = norm_.footprint(shape), core = core_->footprint(shape);
  const Footprint o = o_proj_->footprint(shape);
  Footprint result{.kept_through_recompute = core.kept_through_recompute, .output = o.output};
  result.keep(norm.kept, norm.output);
  result.keep(query_.footprint(shape).kept);
  result.keep(keys_.footprint(shape, /*expands=*/ring_ == nullptr).kept);
  if (ring_ != nullptr) {
    const int64_t rows = region_.gathers_again() ? shape.rows() : shape.tokens();
    result.keep({{"latent", rows * shape_.cached() * shape.own()}});
  }
  const int64_t heads = core_->num_heads() * shape_.v_head_dim;
  result.keep(core.kept, {"attention", shape.tokens() * heads * shape.own()});
  result.keep(o.kept);
  return result;
}

namespace {

/// Adds a layer's weights to the list.
class LatentWeights {
 public:
  LatentWeights(const ModelConfig& config, const LatentOptions& options, ParameterList& parameters)
      : config_(config), options_(options), parameters_(parameters) {}

  Parameter& add(const char* name, const Shape& shape, double init_std) {
    return parameters_.add(options_.prefix + name + ".weight", shape, init_std);
  }
  Parameter& add(const char* name, const Shape& shape) {
    return add(name, shape, options_.init_std);
  }
  RmsNorm norm(const char* name, int64_t width, double eps) {
    Parameter& weight = add(name, {width}, 0);
    options_.region.replicate(weight);
    return RmsNorm(weight, eps);
  }
  RmsNorm latent_norm(const char* name, int64_t width) {
    const double eps = config_.mla.latent_rms_norm_eps;
    return norm(name, width, eps > 0 ? eps : config_.rms_norm_eps);
  }
  /// A rank's own rows of x, with all of W.
  std::unique_ptr<Linear> on_own_rows(const char* name, int64_t width) {
    Parameter& weight = add(name, {width, config_.hidden_size});
    options_.region.replicate(weight);
    return std::make_unique<Linear>(std::vector<Parameter*>{&weight}, "latent");
  }
  LatentQuery query();
  LatentKeys keys();

 private:
  const ModelConfig& config_;
  const LatentOptions& options_;
  ParameterList& parameters_;
};

LatentQuery LatentWeights::query() {
  const int64_t Q = config_.mla.q_lora_rank, width = config_.num_heads * config_.mla.head_dim();
  const auto heads = [&](const char* name, int64_t input) {
    return make_column_parallel({&add(name, {width, input})}, "q", options_.region);
  };
  if (Q == 0) return {nullptr, std::nullopt, heads("self_attn.q_proj", config_.hidden_size)};
  auto q_a = on_own_rows("self_attn.q_a_proj", Q);
  const RmsNorm normed = latent_norm("self_attn.q_a_layernorm", Q);
  return {std::move(q_a), normed, heads("self_attn.q_b_proj", Q)};
}

LatentKeys LatentWeights::keys() {
  const MlaShape& mla = config_.mla;
  auto kv_a = on_own_rows("self_attn.kv_a_proj_with_mqa", mla.cached());
  const RmsNorm normed = latent_norm("self_attn.kv_a_layernorm", mla.kv_lora_rank);
  const int64_t width = config_.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim);
  Parameter& kv_b = add("self_attn.kv_b_proj", {width, mla.kv_lora_rank});
  auto kv_b_proj = make_column_parallel({&kv_b}, "kv", options_.region);
  return {mla, std::move(kv_a), normed, std::move(kv_b_proj), kv_b};
}

}  // namespace

std::unique_ptr<Segment> make_latent_attention(const ModelConfig& config,
                                               const LatentOptions& options,
                                               ParameterList& parameters) {
  const int64_t heads = options.region.heads(config.num_heads);
  LatentWeights weights(config, options, parameters);
  const RmsNorm norm = weights.norm("input_layernorm", config.hidden_size, config.rms_norm_eps);
  LatentQuery query = weights.query();
  LatentKeys keys = weights.keys();
  Parameter& o = weights.add("self_attn.o_proj",
                             {config.hidden_size, config.num_heads * config.mla.v_head_dim},
                             options.output_init_std);
  std::unique_ptr<CoreAttention> core;
  if (passes_latents_on(config, options.context.config())) {
    core = std::make_unique<LatentRing>(heads, config.mla, keys.expansion_weight(),
                                        options.probabilities, options.context);
  } else {
    core = make_core_attention(heads, heads, config.mla.head_dim(), options.probabilities,
                               options.context);
  }
  core->scale_scores(config.rope_scaling.score_factor());
  return std::make_unique<LatentAttention>(
      config.mla, norm, std::move(query), std::move(keys), options.rope, std::move(core),
      make_row_parallel(o, options.region), options.region, options.context);
}

}  // namespace usp
