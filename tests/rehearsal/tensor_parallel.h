#pragma once

#include "comm/communicator.h"
#include "host_math.h"
#include "layers.h"
#include "tensor/runtime.h"

/// Tensor and sequence parallelism on the layers of chapter 1.
namespace usp::rehearsal {

/// Under sequence parallelism a rank holds T/tp of the tokens outside of the linear layers.
inline Tensor gather_rows(const Communicator& tp, const Tensor& x) {
  Tensor whole = Tensor::empty({x.size(0) * tp.size(), x.size(1)}, x.dtype());
  tp.all_gather(whole, x);
  return whole;
}

inline Tensor scatter_sum(const Communicator& tp, const Tensor& x) {
  Tensor shard = Tensor::empty({x.size(0) / tp.size(), x.size(1)}, x.dtype());
  tp.reduce_scatter(shard, x);
  return shard;
}

/// A rank has some of the output features, and all of the tokens' inputs.
class ColumnParallelLinear : public Linear {
 public:
  ColumnParallelLinear(std::vector<Parameter*> weights, const Communicator& tp, bool sequence)
      : Linear(std::move(weights)), tp_(tp), sequence_(sequence) {}

  Tensor forward(const Tensor& x, Saved& saved) const override {
    if (!sequence_) return Linear::forward(x, saved);
    Tensor y = output(keep(gather_rows(tp_, x)));
    saved.x = x;  // the shard: backward gathers again what it needs
    return y;
  }

  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads) const override {
    Tensor dx = input_gradient(dy);  // of this rank's features: one term of the sum
    if (!sequence_) {
      Handle sum = tp_.all_reduce_async(dx);
      add_weight_gradient(dy, saved, grads);  // while dx travels
      sum.wait();
      return dx;
    }
    Tensor shard = Tensor::empty({dx.size(0) / tp_.size(), dx.size(1)}, dx.dtype());
    Handle sum = tp_.reduce_scatter_async(shard, dx);
    add_weight_gradient(dy, keep(gather_rows(tp_, saved.x)), grads);
    sum.wait();
    return shard;
  }

 private:
  Communicator tp_;
  bool sequence_;
};

/// A rank has some of the input features, and so one term of the output.
class RowParallelLinear : public Linear {
 public:
  RowParallelLinear(std::vector<Parameter*> weights, const Communicator& tp, bool sequence)
      : Linear(std::move(weights)), tp_(tp), sequence_(sequence) {}

  Tensor forward(const Tensor& x, Saved& saved) const override {
    Tensor y = Linear::forward(x, saved);
    if (sequence_) return scatter_sum(tp_, y);
    tp_.all_reduce(y);
    return y;
  }

  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads) const override {
    return Linear::backward(sequence_ ? gather_rows(tp_, dy) : dy, saved, grads);
  }

 private:
  Communicator tp_;
  bool sequence_;
};

class VocabParallelEmbedding : public Embedding {
 public:
  VocabParallelEmbedding(Parameter& weight, const Communicator& tp, bool sequence)
      : Embedding(weight), tp_(tp), sequence_(sequence) {}

  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override {
    Tensor y = Embedding::forward(x, saved, pass);  // zeros for tokens of other ranks
    if (sequence_) return scatter_sum(tp_, y);
    tp_.all_reduce(y);
    return y;
  }

  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override {
    return Embedding::backward(sequence_ ? gather_rows(tp_, dy) : dy, saved, grads, pass);
  }

 private:
  Communicator tp_;
  bool sequence_;
};

/// Three numbers a row cross the ranks, never the logits.
class VocabParallelCrossEntropy : public CrossEntropy {
 public:
  VocabParallelCrossEntropy(int64_t vocab_offset, const Communicator& tp)
      : CrossEntropy(vocab_offset), tp_(tp) {}

  void forward(const Tensor& logits, Saved& saved, const Pass& pass) const override {
    const Rows rows = rows_of(logits, pass);
    const Tensor max = Tensor::empty(rows.max.shape(), rows.max.dtype());
    ops::copy(max, rows.max);
    tp_.all_reduce(max, ReduceOp::max);
    rescale(rows.sum, rows.max, max);
    tp_.all_reduce(rows.sum);
    tp_.all_reduce(rows.target_logit);
    saved.logits = logits;
    // Every rank knows the loss; the first enters it.
    const Tensor loss = tp_.rank() == 0 ? pass.loss : Tensor::zeros({1}, DType::f64);
    saved.lse = add_loss(loss, {max, rows.sum, rows.target_logit}, pass);
  }

 private:
  Communicator tp_;
};

}  // namespace usp::rehearsal
