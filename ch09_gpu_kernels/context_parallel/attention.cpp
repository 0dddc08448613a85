#include "context_parallel/attention.h"

#include "context_parallel/ring_attention.h"
#include "context_parallel/ulysses.h"

namespace usp {

Tensor ContextAttention::forward(Tensor qkv, Saved& saved, const Pass& pass) const {
  if (pass.mode != Pass::Mode::decode) return forward_rows(std::move(qkv), saved, pass);
  // Without a cache every rank has the whole text.
  if (pass.kv_cache == nullptr) return CoreAttention::forward(std::move(qkv), saved, pass);
  return decode(qkv, pass);
}

ContextAttention::Part ContextAttention::attend(const Tensor& qkv, const Tensor& kv,
                                                const Positions& keys, const Tensor& probs,
                                                const Pass& pass) const {
  const int64_t B = qkv.size(0), S = qkv.size(1);
  const DType acc = accumulate_dtype(qkv.dtype());
  Part part{Tensor::empty({B, S, num_heads(), head_dim()}, acc, "attention"),
            Tensor::empty({B, num_heads(), S}, acc, "lse")};
  ops::attention_forward(part.out, part.lse, probs, q_of(qkv), keys_of(kv), values_of(kv), scale(),
                         pass.positions, keys, pass.documents);
  return part;
}

// [decode]
Tensor ContextAttention::decode(const Tensor& qkv, const Pass& pass) const {
  const Communicator& cp = group_.cp();
  const KvCache::Share share{cp.rank(), cp.size()};
  const Tensor kv = pass.kv_cache->append(this, kv_of(qkv), pass.positions, share);
  const Positions keys(pass.kv_cache->first_position(share), kv.size(1));
  const Part part = attend(qkv, kv, keys, /*probs=*/{}, pass);
  return merge_shares(part.out, part.lse, qkv.dtype(), cp);
}

Tensor merge_shares(const Tensor& out, const Tensor& lse, DType dtype, const Communicator& cp) {
  const int64_t B = out.size(0), S = out.size(1), N = out.size(2), D = out.size(3);
  const Tensor outs = Tensor::empty({cp.size() * B, S, N, D}, out.dtype());
  const Tensor lses = Tensor::empty({cp.size() * B, N, S}, lse.dtype());
  cp.all_gather(outs, out);
  cp.all_gather(lses, lse);
  for (int64_t rank = 1; rank < cp.size(); ++rank) {  // the same order on every rank
    ops::attention_merge(outs.narrow(0, 0, B), lses.narrow(0, 0, B), outs.narrow(0, rank * B, B),
                         lses.narrow(0, rank * B, B));
  }
  const Tensor merged = Tensor::empty(out.shape(), dtype);
  ops::copy(merged, outs.narrow(0, 0, B));
  return merged;
}
// [decode]

Tensor in_dtype(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  const Tensor rounded = Tensor::empty(x.shape(), dtype);
  ops::copy(rounded, x);
  return rounded;
}

std::unique_ptr<CoreAttention> make_core_attention(int64_t num_heads, int64_t num_kv_heads,
                                                   int64_t head_dim, Probabilities probabilities,
                                                   const ContextGroup& group) {
  if (group.size() == 1) {
    return std::make_unique<CoreAttention>(num_heads, num_kv_heads, head_dim, probabilities);
  }
  if (group.config().head_ranks() == 1) {
    return std::make_unique<RingAttention>(num_heads, num_kv_heads, head_dim, probabilities, group);
  }
  return std::make_unique<UlyssesAttention>(num_heads, num_kv_heads, head_dim, probabilities,
                                            group);
}

}  // namespace usp
