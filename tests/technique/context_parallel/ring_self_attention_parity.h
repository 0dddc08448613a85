#pragma once

#include "comm/launch.h"
#include "context_parallel/ring_attention.h"
#include "examples/ring_self_attention.h"
#include "technique/data_parallel/data_parallel_parity.h"
#include "testing.h"

/// Ring self-attention next to attention on one rank, and what it holds and sends.
namespace usp::test {

/// Throws unless each rank's rows are those of attention to the whole sample.
inline void check_ring_self_attention(const Communicator& world, uint64_t seed) {
  const int64_t n = world.size(), R = 3, S = n * R, B = 2, N = 3, D = 4;
  Random random(seed);  // the same on every rank
  const auto heads = [&] { return random.tensor({B, S, N, D}); };
  const Tensor q = heads(), k = heads(), v = heads(), dout = heads();
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f64); };
  const Tensor out = zeros(q.shape()), lse = zeros({B, N, S}), delta = zeros({B, N, S});
  const Tensor probs = zeros({B, N, S, S});
  const Tensor dq = zeros(q.shape()), dk = zeros(q.shape()), dv = zeros(q.shape());
  const double scale = 1 / std::sqrt(double(D));
  const Positions all(0, S);
  ops::attention_forward(out, lse, probs, q, k, v, scale, all, all);
  ops::attention_delta(delta, dout, out);
  ops::attention_backward(dq, dk, dv, dout, probs, q, k, v, lse, delta, scale, all, all,
                          /*accumulate=*/false);
  const auto own = [&](const Tensor& x) {
    return x.narrow(1, world.rank() * R, R).to_contiguous();
  };
  const RingSelfAttention attention(world);
  RingSelfAttention::Saved saved;
  const auto expect_own = [&](const Tensor& got, const Tensor& whole, const char* what) {
    expect_close(got.items(), own(whole).items(), 1e-10, fmt::format("cp {}: {}", n, what));
  };
  expect_own(attention.forward(own(q), own(k), own(v), saved), out, "out");
  const RingSelfAttention::Gradients gradients = attention.backward(own(dout), saved);
  expect_own(gradients.dq, dq, "dq");
  expect_own(gradients.dk, dk, "dk");
  expect_own(gradients.dv, dv, "dv");
}

/// What the allocator and the ledger count of one rank of n, without data.
struct AttentionCounts {
  int64_t kept = 0, peak = 0;  ///< bytes of activations
  int64_t sent = 0, messages = 0;
};

/// `forward` returns the backward pass, and with it what lives until then.
inline AttentionCounts count_attention(
    int n, const std::function<std::function<void()>(const Communicator& ring)>& forward) {
  OnDevice meta(Device::meta);
  DryEngine engine(n - 1, n);
  AttentionCounts found;
  const std::function<void()> backward = forward(Communicator::world(engine));
  found.kept = meta.allocator().live_bytes(Category::activations);
  backward();
  found.peak = meta.allocator().peak_bytes(Category::activations);
  for (const auto& [key, entry] : meta.runtime.ledger().entries()) {
    found.sent += entry.wire_bytes;
    if (key.second != CommKind::recv) found.messages += entry.calls;
  }
  return found;
}

inline AttentionCounts count_ring_self_attention(int n, const Shape& rows, DType dtype) {
  return count_attention(n, [&](const Communicator& ring) {
    const auto heads = [&] { return Tensor::empty(rows, dtype); };
    const RingSelfAttention attention(ring);
    RingSelfAttention::Saved saved;
    const Tensor out = attention.forward(heads(), heads(), heads(), saved);
    return [=, alive = out] { attention.backward(Tensor::empty(rows, dtype), saved); };
  });
}

inline AttentionCounts count_ring_attention(int n, const Shape& rows, DType dtype) {
  return count_attention(n, [&](const Communicator& ring) {
    ContextParallelConfig config;
    config.cp_size = n;
    const ContextGroup group(config, ring);
    const auto attention = std::make_shared<RingAttention>(rows[2], rows[2], rows[3],
                                                           Probabilities::never_whole, group);
    Pass pass;
    pass.num_samples = rows[0];
    pass.seq_len = n * rows[1];
    pass.positions = group.positions(pass.seq_len);
    const auto saved = std::make_shared<CoreAttention::Saved>();
    const Tensor qkv = Tensor::empty({rows[0], rows[1], 3 * rows[2], rows[3]}, dtype);
    const Tensor out = attention->forward(qkv, *saved, pass);
    return
        [=, alive = out] { attention->backward(Tensor::empty(rows, dtype), *saved, pass, dtype); };
  });
}

}  // namespace usp::test
