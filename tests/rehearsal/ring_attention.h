#pragma once

#include "comm/communicator.h"
#include "host_math.h"
#include "layers.h"

/// Context parallelism: the sequence is cut into 2 cp pieces, and rank r holds the r-th from the
/// front and the r-th from the back.
namespace usp::rehearsal {

/// The positions of a rank's rows, which are 1/cp of the sequence.
inline Positions zigzag(int64_t seq_len, int64_t rank, int64_t cp) {
  const int64_t piece = seq_len / (2 * cp);
  return {rank * piece, piece, (2 * cp - 1 - rank) * piece, piece};
}

/// Keys and values go around the ring, one rank further in each of cp steps.
class RingAttention : public CoreAttention {
 public:
  RingAttention(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, const Communicator& cp)
      : CoreAttention(num_heads, num_kv_heads, head_dim, Probabilities::never_whole), cp_(cp) {}

  Tensor forward(const Tensor& qkv, Saved& saved, const Pass& pass) const override {
    Tensor kv = kv_of(qkv);
    for (int step = 0; step < cp_.size(); ++step) {
      Tensor next = Tensor::empty(kv.shape(), kv.dtype());
      Handle passing = step + 1 < cp_.size() ? pass_on(kv, next) : Handle();
      const Tensor out =
          Tensor::empty({qkv.size(0), qkv.size(1), num_heads(), head_dim()}, qkv.dtype());
      const Tensor lse = Tensor::empty({out.size(0), out.size(2), out.size(1)}, out.dtype());
      ops::attention_forward(out, lse, {}, q_of(qkv), keys(kv), values(kv), scale(), pass.positions,
                             positions(pass, step));
      if (step == 0) {
        saved.out = out;
        saved.lse = lse;
      } else {
        merge_attention(saved.out, saved.lse, out, lse);
      }
      passing.wait();
      kv = next;
    }
    return saved.out;
  }

  Tensor backward(const Tensor& dout, const Tensor& qkv, Saved& saved,
                  const Pass& pass) const override {
    const Tensor delta = Tensor::empty(saved.lse.shape(), saved.lse.dtype());
    ops::attention_delta(delta, dout, saved.out);
    Tensor dqkv = Tensor::zeros(qkv.shape(), qkv.dtype());
    Tensor kv = kv_of(qkv);
    Tensor dkv = Tensor::zeros(kv.shape(), kv.dtype());  // travels with them, and comes home
    for (int step = 0; step < cp_.size(); ++step) {
      Tensor next = Tensor::empty(kv.shape(), kv.dtype());
      Handle passing = step + 1 < cp_.size() ? pass_on(kv, next) : Handle();
      ops::attention_backward(q_of(dqkv), keys(dkv), values(dkv), dout, {}, q_of(qkv), keys(kv),
                              values(kv), saved.lse, delta, scale(), pass.positions,
                              positions(pass, step));
      passing.wait();
      kv = next;
      Tensor next_dkv = Tensor::empty(dkv.shape(), dkv.dtype());
      pass_on(dkv, next_dkv).wait();
      dkv = next_dkv;
    }
    ops::copy(dqkv.narrow(2, num_heads(), 2 * num_kv_heads()), dkv);
    return dqkv;
  }

 private:
  /// [B, S, 2G, D], contiguous: what is sent.
  Tensor kv_of(const Tensor& qkv) const {
    const Tensor part = qkv.narrow(2, num_heads(), 2 * num_kv_heads());
    Tensor kv = Tensor::empty(part.shape(), part.dtype());
    ops::copy(kv, part);
    return kv;
  }
  Tensor keys(const Tensor& kv) const { return kv.narrow(2, 0, num_kv_heads()); }
  Tensor values(const Tensor& kv) const { return kv.narrow(2, num_kv_heads(), num_kv_heads()); }

  Handle pass_on(const Tensor& tensor, const Tensor& next) const {
    if (cp_.size() == 1) {
      ops::copy(next, tensor);
      return {};
    }
    const int n = cp_.size(), r = cp_.rank();
    const SendRecv batch[] = {{SendRecv::send, tensor, (r + 1) % n},
                              {SendRecv::recv, next, (r + n - 1) % n}};
    return cp_.send_recv_async(batch);
  }

  /// Those of the keys that are here in the step.
  Positions positions(const Pass& pass, int step) const {
    const int n = cp_.size(), owner = (cp_.rank() - step + n) % n;
    return zigzag(pass.positions.count() * n, owner, n);
  }

  Communicator cp_;
};

}  // namespace usp::rehearsal
