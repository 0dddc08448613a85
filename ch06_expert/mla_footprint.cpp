#include <algorithm>

#include "mla.h"

/// What latent attention holds and asks for: bytes of the tensors of mla.cpp, in the order in which
/// they come and go.
namespace usp {

namespace {

int64_t sum_of(const std::vector<NamedBytes>& tensors) {
  int64_t bytes = 0;
  for (const NamedBytes& tensor : tensors) bytes += tensor.bytes;
  return bytes;
}

/// Of a linear layer, or norm, that works on a rank's own rows.
PassShape own_rows(const PassShape& shape) { return {1, shape.rows(), shape.dtype}; }

/// The rows of x that a linear layer gathered for its weight's gradient.
int64_t gathered_again(const Footprint& linear, const PassShape& shape) {
  const bool again = linear.keeps_x && shape.row_shares > 1;
  return again ? linear.held - linear.output.bytes : 0;
}

/// A piece's forward pass; what it keeps and returns stays.
void run(Alive& alive, const Footprint& piece) {
  const int64_t kept = sum_of(piece.kept);
  alive.at_most(kept + piece.forward_peak);
  alive.take(kept + piece.output.bytes);
}

}  // namespace

// [footprint]
Footprint LatentQuery::footprint(const PassShape& shape) const {
  const Footprint q_b = q_b_proj_->footprint(shape);
  const int64_t again = gathered_again(q_b, shape);
  if (!q_a_proj_) {
    Footprint result = q_b;
    result.held_dy = again;
    result.split_peak = q_b.backward_peak;
    return result;
  }
  const Footprint q_a = q_a_proj_->footprint(own_rows(shape)), norm = norm_->footprint(shape);
  const int64_t c_q = norm.output.bytes, dc = c_q;  // normed; before the norm it has as many
  Footprint result{.output = q_b.output};
  result.keep(norm.kept, q_a.output);
  result.keep(q_b.kept, q_b.keeps_x ? norm.output : NamedBytes{});
  result.forward_peak = q_b.forward_peak + (q_b.keeps_x ? 0 : c_q);
  result.backward_peak =
      std::max({q_b.backward_peak, dc + norm.backward_peak, dc + q_a.backward_peak});
  result.held = q_a.held + norm.held + q_b.held;
  result.held_dy = 2 * dc + again;
  result.split_peak = std::max(q_b.backward_peak, result.held_dy + q_a.backward_peak);
  return result;
}

LatentKeys::Footprints LatentKeys::footprints(const PassShape& shape) const {
  return {kv_a_proj_->footprint(own_rows(shape)), norm_.footprint(shape),
          kv_b_proj_->footprint(shape)};
}

LatentAttention::Parts LatentAttention::parts(const PassShape& shape) const {
  const int64_t T = shape.tokens(), N = core_->num_heads(), D = core_->head_dim();
  const int64_t rope = shape_.qk_rope_head_dim, gathered = shape.row_shares > 1 ? 1 : 0;
  const LatentKeys::Footprints keys = keys_.footprints(shape);
  Ring ring;
  if (ring_ != nullptr) {
    const int64_t W = shape_.cached(), own = shape.rows() * W * shape.own();
    const int64_t latents = T * W * shape.own(), arrived = gathered * latents;
    ring = {.own = own,
            .arrived = arrived,
            .kept = region_.gathers_again() ? own : latents,
            .again = region_.gathers_again() ? arrived : 0,
            .latents = latents,
            .dq = T * N * D * shape.acc(),
            .dlatents = T * W * shape.acc(),
            .weight_sum = ring_->held(shape)};
  }
  return {.norm = norm_.footprint(shape),
          .query = query_.footprint(shape),
          .keys = keys,
          .core = core_->footprint(shape),
          .o_proj = o_proj_->footprint(shape),
          .heads = T * N * shape_.v_head_dim * shape.own(),
          .qkv = T * 3 * N * D * shape.own(),
          .dqkv = T * 3 * N * D * shape.acc(),
          .k_rope = T * rope * shape.own(),
          .own_k_rope = gathered * shape.rows() * rope * shape.own(),
          .sum_k_rope = T * rope * shape.acc(),
          .gathered_latent = gathered_again(keys.kv_b_proj, shape),
          .ring = ring};
}

void LatentAttention::make_latents(const Parts& parts, Alive& alive) {
  const auto& [kv_a, kv_norm, kv_b] = parts.keys;
  const int64_t c = kv_norm.output.bytes;
  const int64_t k_rope = kv_a.output.bytes - c;  // of this rank's rows
  alive.take(kv_a.output.bytes);
  alive.take(c + k_rope + sum_of(kv_norm.kept) + c);
  alive.release(kv_a.output.bytes);
}

void LatentAttention::attend(const Parts& parts, Alive& alive) {
  const auto& [kv_a, kv_norm, kv_b] = parts.keys;
  const int64_t c = kv_norm.output.bytes, k_rope = kv_a.output.bytes - c;
  alive.take(parts.qkv);
  run(alive, parts.query);
  alive.release(parts.query.output.bytes);
  make_latents(parts, alive);
  const int64_t gathered = parts.own_k_rope > 0 ? parts.k_rope : 0;
  alive.take(gathered);
  run(alive, kv_b);
  alive.release(kv_b.output.bytes + gathered + k_rope + (kv_b.keeps_x ? 0 : c));
  alive.release(parts.qkv);  // which core's own footprint has
  run(alive, parts.core);
}

void LatentAttention::attend_over_ring(const Parts& parts, Alive& alive) {
  const Ring& ring = parts.ring;
  make_latents(parts, alive);
  alive.take(ring.own);
  alive.release(parts.keys.kv_a_proj.output.bytes);  // what they are joined from
  alive.take(ring.arrived);
  run(alive, parts.query);
  if (ring.kept == ring.arrived) alive.release(ring.own);
  alive.release(parts.query.output.bytes);  // which core's own footprint has
  run(alive, parts.core);
  alive.release(ring.again);
}

int64_t LatentAttention::forward_most(const Parts& parts) const {
  Alive alive;
  alive.take(sum_of(parts.norm.kept) + parts.norm.output.bytes);
  if (ring_ != nullptr) {
    attend_over_ring(parts, alive);
  } else {
    attend(parts, alive);
  }
  alive.take(parts.heads);
  run(alive, parts.o_proj);
  return alive.most();
}

void LatentAttention::attend_backward(const Parts& parts, Alive& alive) {
  const int64_t dq = parts.query.output.bytes, dkv = parts.keys.kv_b_proj.output.bytes;
  const int64_t dout = parts.qkv / 3;
  alive.take(dout);
  alive.at_most(parts.core.backward_peak);
  alive.release(dout);
  alive.take(parts.dqkv);
  alive.take(dq + dkv);
  alive.at_most(2 * parts.sum_k_rope);
  alive.take(parts.k_rope);
  alive.release(parts.dqkv);
  alive.release(parts.heads);
  alive.take(parts.own_k_rope);
}

void LatentAttention::attend_backward_over_ring(const Parts& parts, bool split, Alive& alive) {
  const Ring& ring = parts.ring;
  const int64_t dout = parts.qkv / 3, dq = parts.query.output.bytes;
  alive.take(ring.again + dout);
  alive.at_most(parts.core.backward_peak);
  alive.release(ring.again + dout);
  alive.take(ring.dq + ring.dlatents);
  if (split) alive.take(ring.weight_sum);
  if (ring.dq != dq) {  // rounded
    alive.take(dq);
    alive.release(ring.dq);
    alive.take(ring.latents);
    alive.release(ring.dlatents);
  }
  alive.release(parts.heads);
  alive.take(ring.arrived > 0 ? ring.own : 0);
}

int64_t LatentAttention::backward_most(const Parts& parts, bool split) const {
  const auto& [kv_a, kv_norm, kv_b] = parts.keys;
  const int64_t dq = parts.query.output.bytes, dkv = kv_b.output.bytes;
  const int64_t dnormed = parts.norm.output.bytes, dlatent = kv_norm.output.bytes;
  const auto unless_split = [&](int64_t bytes) { return split ? 0 : bytes; };
  Alive alive;
  alive.at_most(parts.o_proj.backward_peak);
  if (split) alive.take(parts.o_proj.held_dy);
  alive.take(parts.heads);  // their gradient, like those that follow
  if (ring_ != nullptr) {
    attend_backward_over_ring(parts, split, alive);
  } else {
    attend_backward(parts, alive);
  }
  alive.at_most(split ? parts.query.split_peak : parts.query.backward_peak);
  if (split) alive.take(parts.query.held_dy);
  alive.take(dnormed);
  alive.release(unless_split(dq));
  if (ring_ == nullptr) {
    alive.at_most(kv_b.backward_peak);
    if (split) alive.take(parts.gathered_latent);
  }
  alive.take(dlatent);
  if (ring_ == nullptr) alive.release(unless_split(dkv));
  alive.take(dlatent);
  alive.release(unless_split(dlatent));
  alive.take(kv_a.output.bytes);
  alive.at_most(std::max(kv_a.backward_peak, parts.norm.backward_peak));
  return alive.most();
}

Footprint LatentAttention::footprint(const PassShape& shape) const {
  const Parts parts = this->parts(shape);
  const auto& [kv_a, kv_norm, kv_b] = parts.keys;
  Footprint result{.kept_through_recompute = parts.core.kept_through_recompute,
                   .output = parts.o_proj.output,
                   .recomputed = parts.core.recomputed};
  result.keep(parts.norm.kept, parts.norm.output);
  result.keep(parts.query.kept);
  result.keep(kv_norm.kept, {"latent", kv_norm.output.bytes});
  if (ring_ != nullptr) {
    result.keep({{"latent", parts.ring.kept}});
  } else {
    result.keep(kv_b.kept, kv_b.keeps_x ? kv_norm.output : NamedBytes{});
  }
  result.keep(parts.core.kept, {"attention", parts.heads});
  result.keep(parts.o_proj.kept);
  result.forward_peak = forward_most(parts) - sum_of(result.kept);
  result.backward_peak = backward_most(parts, /*split=*/false);
  // The projections to both latents read the same rows of x.
  const bool same_x = shape_.q_lora_rank > 0 || shape.row_shares == 1;
  const int64_t expansion = ring_ != nullptr ? parts.ring.weight_sum : kv_b.held;
  result.held = parts.norm.held + parts.query.held + kv_a.held + kv_norm.held + expansion +
                parts.o_proj.held - (same_x ? parts.norm.output.bytes : 0);
  result.split_peak = backward_most(parts, /*split=*/true);
  return result;
}
// [footprint]

}  // namespace usp
