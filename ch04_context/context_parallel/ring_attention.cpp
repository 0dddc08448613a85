#include "context_parallel/ring_attention.h"

#include "tensor/runtime.h"

namespace usp {

namespace {

/// The part of a step in what has n of them side by side.
Tensor of_step(const Tensor& all, int step, int places) {
  const int64_t B = all.size(0) / places;
  return all.narrow(0, step * B, B);
}

}  // namespace

Tensor RingAttention::forward_rows(Tensor qkv, Saved& saved, const Pass& pass) const {
  saved.qkv = qkv;
  if (saved.out.defined()) return saved.out;  // kept while the rest of the block is recomputed
  const auto exchange = exchange_keys(group(), kv_of(qkv).to_contiguous());
  forward_steps(*exchange, saved, pass);
  return saved.out;
}

void RingAttention::forward_steps(KeyExchange& exchange, Saved& saved, const Pass& pass) const {
  const Tensor& qkv = saved.qkv;
  const int64_t B = qkv.size(0), S = qkv.size(1), N = num_heads(), n = places();
  const bool stored = probabilities() == Probabilities::stored;
  const bool whole_blocks = probabilities() != Probabilities::never_whole;
  const DType acc = accumulate_dtype(qkv.dtype());
  if (stored) saved.probs = Tensor::empty({n * B, N, S, S}, qkv.dtype(), "probabilities");
  const Tensor part_lses = stored ? Tensor::empty({n * B, N, S}, acc) : Tensor();
  // [ring_steps]
  Part sum;
  for (int step = 0; step < n; ++step) {
    const Tensor kv = exchange.next();  // and the next ones set off
    const Positions keys = keys_of_step(step, pass);
    if (!sees(pass, keys)) continue;
    Tensor probs = stored ? of_step(saved.probs, step, places()) : Tensor();
    if (whole_blocks && !stored) probs = Tensor::empty({B, N, S, S}, qkv.dtype());
    const Part part = attend(qkv, kv, keys, probs, pass);
    if (stored) ops::copy(of_step(part_lses, step, places()), part.lse);
    if (step == 0) {
      sum = part;
    } else {
      ops::attention_merge(sum.out, sum.lse, part.out, part.lse);
    }
  }
  // [ring_steps]
  if (stored) normalise(saved.probs, part_lses, sum.lse, pass);
  saved.out = sum.out;
  saved.lse = sum.lse;
  if (acc != qkv.dtype()) {  // rounded once, however many places there are
    saved.out = Tensor::empty(sum.out.shape(), qkv.dtype(), "attention");
    ops::copy(saved.out, sum.out);
  }
}

void RingAttention::normalise(const Tensor& probs, const Tensor& part_lses, const Tensor& lse,
                              const Pass& pass) const {
  for (int step = 0; step < places(); ++step) {
    if (!sees(pass, keys_of_step(step, pass))) continue;
    ops::attention_rescale(of_step(probs, step, places()), of_step(part_lses, step, places()), lse);
  }
}

Tensor RingAttention::backward(const Tensor& dout, Saved& saved, const Pass& pass,
                               DType dtype) const {
  const Tensor& qkv = saved.qkv;
  const Tensor dqkv = Tensor::zeros(qkv.shape(), accumulate_dtype(qkv.dtype()));
  auto exchange = exchange_keys(group(), kv_of(qkv).to_contiguous());
  auto gradients = exchange_gradients(group(), kv_of(qkv).shape(), dqkv.dtype());
  backward_steps(q_of(dqkv), dout, *exchange, *gradients, saved, pass);
  exchange.reset();
  ops::copy(kv_of(dqkv), gradients->own());
  gradients.reset();
  return in_dtype(dqkv, dtype);  // rounded once, however many places there are
}

// [ring_backward]
void RingAttention::backward_steps(const Tensor& dq, const Tensor& dout, KeyExchange& exchange,
                                   GradientExchange& gradients, Saved& saved,
                                   const Pass& pass) const {
  const Tensor q = q_of(saved.qkv);
  const Tensor delta = Tensor::empty(saved.lse.shape(), dq.dtype());  // [B, N, S']
  ops::attention_delta(delta, dout, saved.out);
  for (int step = 0; step < places(); ++step) {
    const Tensor kv = exchange.next();
    const Positions keys = keys_of_step(step, pass);
    const Tensor dkv = gradients.share();
    if (sees(pass, keys)) {
      const Tensor probs = probabilities_of(saved, kv, step, pass);
      ops::attention_backward(dq, keys_of(dkv), values_of(dkv), dout, probs, q, keys_of(kv),
                              values_of(kv), saved.lse, delta, scale(), pass.positions, keys,
                              /*accumulate=*/true, pass.documents);
    }
    gradients.pass_on(dkv);
  }
}
// [ring_backward]

Tensor RingAttention::probabilities_of(Saved& saved, const Tensor& kv, int step,
                                       const Pass& pass) const {
  if (probabilities() == Probabilities::never_whole) return {};
  if (probabilities() == Probabilities::stored) return of_step(saved.probs, step, places());
  const RecomputeScope again;
  const int64_t B = kv.size(0), S = kv.size(1);
  const Tensor probs = Tensor::empty({B, num_heads(), S, S}, kv.dtype());
  const Part part = attend(saved.qkv, kv, keys_of_step(step, pass), probs, pass);
  ops::attention_rescale(probs, part.lse, saved.lse);
  return probs;
}

Positions RingAttention::keys_of_step(int step, const Pass& pass) const {
  const int64_t n = places(), S = pass.positions.count() * n;
  return group().config().of_ring_place(S, (group().ring_place() - step + n) % n);
}

Footprint RingAttention::footprint(const PassShape& shape) const {
  Footprint result = CoreAttention::footprint(shape);
  if (probabilities() == Probabilities::stored) result.kept.back().bytes *= places();
  if (keeps_through_recompute()) result.kept_through_recompute = {result.kept[1], result.kept[2]};
  return result;
}

}  // namespace usp
