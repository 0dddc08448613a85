#pragma once

#include "context_parallel/attention.h"
#include "context_parallel/key_exchange.h"

namespace usp {

/// A rank has S' = S/n positions of every sample; its queries meet the keys of one place of the
/// ring after the other, and the partial results are merged. Liu et al. (2023),
/// https://arxiv.org/abs/2310.01889; picotron's and Megatron-LM's context parallelism.
///
/// |              | one GPU          | each of n places                               |
/// |--------------|------------------|------------------------------------------------|
/// | q, out       | [B, S, N, D]     | [B, S', N, D]                                  |
/// | k, v         | [B, S, G, D]     | [B, S', G, D]; those of other places come by   |
/// | scores       | [B, N, S, S]     | [B, N, S', S'] at a time                       |
/// | out, lse     | of all keys      | of a place's keys, merged with those before    |
/// | dk, dv       | of all queries   | of a place's queries, summed on their way home |
class RingAttention : public ContextAttention {
 public:
  /// Heads and dimension are a rank's own.
  RingAttention(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                Probabilities probabilities, const ContextGroup& group)
      : ContextAttention(num_heads, num_kv_heads, head_dim, probabilities, group) {}

  Tensor backward(const Tensor& dout, Saved& saved, const Pass& pass, DType dtype) const override;
  Footprint footprint(const PassShape& shape) const override;

 protected:
  // [steps]
  /// Attention of the queries in saved.qkv to all keys that the exchange brings.
  void forward_steps(KeyExchange& exchange, Saved& saved, const Pass& pass) const;
  /// dq [B, S', N, D] (acc dtype) += the gradient; that of keys and values goes to `gradients`.
  void backward_steps(const Tensor& dq, const Tensor& dout, KeyExchange& exchange,
                      GradientExchange& gradients, Saved& saved, const Pass& pass) const;
  // [steps]
  /// The positions of the keys that are here in a step.
  Positions keys_of_step(int step, const Pass& pass) const;
  // [sees]
  /// Whether a query of this rank sees any of them: keys that are not behind it, of its document.
  /// Other blocks are skipped. They travel nevertheless: a rank knows the documents of its own
  /// queries alone, and places further on may see what this one does not.
  static bool sees(const Pass& pass, const Positions& keys) {
    const std::span<const int32_t> begins = pass.documents.on_host();
    if (!begins.empty()) return causal_pairs(pass.positions, keys, begins) > 0;
    return pass.positions.end() > keys[0];
  }
  // [sees]
  int places() const { return static_cast<int>(group().config().ring_size()); }

 private:
  Tensor forward_rows(Tensor qkv, Saved& saved, const Pass& pass) const override;
  /// Stored probabilities [n B, N, S', S'] are of a step's keys alone; from here on they are of
  /// all.
  void normalise(const Tensor& probs, const Tensor& part_lses, const Tensor& lse,
                 const Pass& pass) const;
  /// Probabilities of a step's block as backward reads them; undefined in blockwise attention.
  Tensor probabilities_of(Saved& saved, const Tensor& kv, int step, const Pass& pass) const;
};

}  // namespace usp
