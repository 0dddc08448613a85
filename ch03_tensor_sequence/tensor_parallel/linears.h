#pragma once

#include <string_view>
#include <vector>

#include "layers.h"
#include "tensor_parallel/region.h"

namespace usp {

/// y = x Wᵀ where a rank has O/t rows of W: all of x, some of y's columns. The entry of a region.
///
/// |         | one GPU  | rank r of t                                         |
/// |---------|----------|-----------------------------------------------------|
/// | W, dW   | [O, I]   | [O/t, I]                                            |
/// | x       | [T, I]   | [T, I]; with sequence parallelism gathered from T/t |
/// | y, dy   | [T, O]   | [T, O/t]                                            |
/// | dx      | [T, I]   | the sum over ranks of partial sums [T, I]           |
class ColumnParallelLinear : public Linear {
 public:
  ColumnParallelLinear(std::vector<Parameter*> weights, std::string_view output_name,
                       const TensorRegion& region)
      : Linear(std::move(weights), output_name), region_(region) {}

  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) const override;
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) const override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  Tensor forward_in_chunks(const Tensor& x, Saved& saved) const;
  Pending input_gradient_of_all(const Tensor& dy) const;

  TensorRegion region_;
};

/// y = x Wᵀ where a rank has I/t columns of W: those that belong to its columns of x, which a
/// column-parallel layer has left there. The exit of a region.
///
/// |         | one GPU  | rank r of t                                           |
/// |---------|----------|-------------------------------------------------------|
/// | W, dW   | [O, I]   | [O, I/t]                                              |
/// | x, dx   | [T, I]   | [T, I/t]                                              |
/// | y       | [T, O]   | the sum over ranks of partial sums; T/t rows of it    |
/// | dy      | [T, O]   | [T, O]; with sequence parallelism gathered from T/t   |
class RowParallelLinear : public Linear {
 public:
  RowParallelLinear(Parameter& weight, std::string_view output_name, const TensorRegion& region,
                    bool ends_block)
      : Linear({&weight}, output_name), region_(region), ends_block_(ends_block) {}

  Tensor forward(const Tensor& x, Saved& saved, const Pass& pass) const override;
  /// The residual is added by the product, unless ranks have a sum to complete before.
  Tensor forward_onto(const Tensor& residual, const Tensor& x, Saved& saved,
                      const Pass& pass) const override;
  Tensor backward(const Tensor& dy, Saved& saved, Grads& grads, const Pass& pass) const override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  Tensor forward_in_chunks(const Tensor& x, Saved& saved, const Pass& pass) const;
  Tensor backward_in_chunks(const Tensor& dy, Saved& saved, Grads& grads) const;
  Tensor drop(const Tensor& x, const Pass& pass) const;

  TensorRegion region_;
  bool ends_block_;
};

/// A lookup is the product of a one-hot row and the table, so a table cut by rows of the vocabulary
/// is a row-parallel layer: a rank adds zeros for the tokens of other ranks.
class VocabParallelEmbedding : public Embedding {
 public:
  VocabParallelEmbedding(Parameter& weight, const TensorRegion& region)
      : Embedding(weight), region_(region) {
    region.share(weight, 0);
  }

  Tensor forward(const Tensor& x, BlockSaved& saved, const Pass& pass) override;
  Tensor backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) override;
  Footprint footprint(const PassShape& shape) const override;

 private:
  TensorRegion region_;
};

/// The loss from logits of which a rank has the columns of its shard of the vocabulary: three
/// numbers a token cross the ranks, and never the logits.
class VocabParallelCrossEntropy : public CrossEntropy {
 public:
  VocabParallelCrossEntropy(int64_t vocab_offset, const TensorRegion& region)
      : CrossEntropy(vocab_offset), region_(region) {}

  void forward(const Tensor& logits, Saved& saved, const Pass& pass) const override;

 private:
  TensorRegion region_;
};

/// Leaves each rank its rows of the weights, unless they have been sharded before.
std::unique_ptr<Linear> make_column_parallel(std::vector<Parameter*> weights,
                                             std::string_view output_name,
                                             const TensorRegion& region);
/// The same for q, k and v, of which it leaves each rank whole heads.
std::unique_ptr<Linear> make_qkv_parallel(Parameter& q, Parameter& k, Parameter& v, int64_t G,
                                          const TensorRegion& region);
/// Leaves each rank its columns of the weight. `ends_block`: nothing reads the output in the block,
/// so a recomputation of the block need not complete it.
std::unique_ptr<Linear> make_row_parallel(Parameter& weight, const TensorRegion& region,
                                          bool ends_block = false);

/// Logits [B, V] from each rank's columns of them, for whoever draws a token.
Tensor gather_vocabulary(const Tensor& logits, int64_t vocab_size, const Communicator& tp);

}  // namespace usp
