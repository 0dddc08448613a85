#include "tensor_parallel/linears.h"

#include "base/rng.h"
#include "tensor/runtime.h"

namespace usp {

Tensor ColumnParallelLinear::forward(const Tensor& x, Saved& saved, const Pass& pass) const {
  if (region_.in_chunks() && region_.shares_rows(pass)) return forward_in_chunks(x, saved);
  saved = keep(region_.enter(x, pass).wait());
  const Tensor y = output(saved, /*residual=*/{});
  if (region_.gathers_again()) saved.x = x;
  return y;
}

// [column_backward]
Tensor ColumnParallelLinear::backward(const Tensor& dy, Saved& saved, Grads& grads,
                                      const Pass&) const {
  Pending x = region_.gathers_again() ? region_.gather(saved.x) : Pending(saved.x);
  if (!region_.overlaps()) x.wait();
  Pending dx = input_gradient_of_all(dy);
  if (!region_.overlaps()) dx.wait();
  const bool again = region_.gathers_again();
  add_weight_gradient(dy, again ? keep(x.wait()) : saved, grads);  // while dx is summed
  return dx.wait();
}
// [column_backward]

/// dx summed over the ranks, on its way.
Pending ColumnParallelLinear::input_gradient_of_all(const Tensor& dy) const {
  if (!region_.in_chunks()) return region_.enter_backward(input_gradient(dy));
  const Tensor w = weight();
  return region_.sum_in_chunks(
      {dy.size(0), w.size(1)}, dy.dtype(),
      [&](int64_t begin, int64_t count, const Tensor& rows) {
        ops::linear_backward_input(rows, dy.narrow(0, begin, count), w);
      },
      region_.shares_rows());
}

Tensor ColumnParallelLinear::forward_in_chunks(const Tensor& x, Saved& saved) const {
  const Tensor w = weight();
  const int64_t T = x.size(0) * region_.size();
  const Tensor y = Tensor::empty({T, w.size(0)}, x.dtype(), output_name());
  const bool again = region_.gathers_again();
  const Tensor whole = again ? Tensor() : Tensor::empty({T, x.size(1)}, x.dtype(), "gathered");
  region_.gather_in_chunks(x, [&](int64_t begin, int64_t count, const Tensor& rows) {
    ops::linear_forward(y.narrow(0, begin, count), rows, w);
    if (!again) ops::copy(whole.narrow(0, begin, count), rows);
  });
  saved = keep(again ? x : whole);
  return y;
}

// [row]
Tensor RowParallelLinear::forward(const Tensor& x, Saved& saved, const Pass& pass) const {
  const bool unread = ends_block_ && pass.mode == Pass::Mode::recompute;
  if (region_.in_chunks() && !unread) return drop(forward_in_chunks(x, saved, pass), pass);
  const Tensor y = Linear::forward(x, saved, pass);  // this rank's partial sum
  if (unread) return region_.own_rows(y);
  return drop(region_.leave(y, pass).wait(), pass);
}

Tensor RowParallelLinear::forward_onto(const Tensor& residual, const Tensor& x, Saved& saved,
                                       const Pass& pass) const {
  const bool is_whole = region_.size() == 1 && region_.config().dropout == 0;
  if (is_whole) return Linear::forward_onto(residual, x, saved, pass);
  const Tensor y = forward(x, saved, pass);
  if (residual.defined()) ops::add(y, residual, y);
  return y;
}

Tensor RowParallelLinear::backward(const Tensor& dy, Saved& saved, Grads& grads,
                                   const Pass& pass) const {
  const Tensor dsum = drop(dy, pass);
  if (region_.in_chunks() && region_.shares_rows()) return backward_in_chunks(dsum, saved, grads);
  return Linear::backward(region_.leave_backward(dsum).wait(), saved, grads, pass);
}
// [row]

/// Sets elements to 0, in backward the same as in forward: which ones depends on the sample, the
/// position and the channel, and not on the rank that holds them.
Tensor RowParallelLinear::drop(const Tensor& x, const Pass& pass) const {
  const double rate = region_.config().dropout;
  if (rate == 0 || pass.mode == Pass::Mode::eval || pass.mode == Pass::Mode::decode) return x;
  const RandomStream random(pass.seed, "dropout." + parameters().front()->name);
  const Tensor y = Tensor::empty(x.shape(), x.dtype(), output_name());
  each_run(pass, region_.first_row(x.size(0), pass), x.size(0),
           [&](int64_t row, int64_t count, int64_t token) {
             ops::dropout(y.narrow(0, row, count), x.narrow(0, row, count), rate, random, token);
           });
  return y;
}

Tensor RowParallelLinear::forward_in_chunks(const Tensor& x, Saved& saved, const Pass& pass) const {
  saved = keep(x);
  const Tensor w = weight();
  const auto output_rows = [&](int64_t begin, int64_t count, const Tensor& rows) {
    ops::linear_forward(rows, x.narrow(0, begin, count), w);
  };
  const Shape shape{x.size(0), w.size(0)};
  return region_.sum_in_chunks(shape, x.dtype(), output_rows, region_.shares_rows(pass)).wait();
}

Tensor RowParallelLinear::backward_in_chunks(const Tensor& dy, Saved& saved, Grads& grads) const {
  const Tensor w = weight();
  const int64_t T = dy.size(0) * region_.size();
  const Tensor whole = Tensor::empty({T, dy.size(1)}, dy.dtype(), "gathered");
  const Tensor dx = Tensor::empty({T, w.size(1)}, dy.dtype());
  region_.gather_in_chunks(dy, [&](int64_t begin, int64_t count, const Tensor& rows) {
    ops::linear_backward_input(dx.narrow(0, begin, count), rows, w);
    ops::copy(whole.narrow(0, begin, count), rows);
  });
  add_weight_gradient(whole, saved, grads);
  return dx;
}

Tensor VocabParallelEmbedding::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  return region_.leave(Embedding::forward(x, saved, pass), pass).wait();
}

Tensor VocabParallelEmbedding::backward(const Tensor& dy, BlockSaved& saved, Grads& grads,
                                        const Pass& pass) {
  return Embedding::backward(region_.leave_backward(dy).wait(), saved, grads, pass);
}

/// A loss that nobody reads.
static Tensor ignored() {
  const CategoryScope scope(Category::workspace);
  return Tensor::zeros({1}, DType::f64);
}

// [cross_entropy]
void VocabParallelCrossEntropy::forward(const Tensor& logits, Saved& saved,
                                        const Pass& pass) const {
  const Rows rows = rows_of(logits, pass);  // of this rank's tokens of the vocabulary
  const Tensor max = Tensor::empty(rows.max.shape(), rows.max.dtype());
  ops::copy(max, rows.max);
  region_.reduce(max, ReduceOp::max);
  ops::cross_entropy_rescale(rows.sum, rows.max, max);
  region_.reduce(rows.sum);
  region_.reduce(rows.target_logit);  // 0 on every rank but the one that has the target
  saved.logits = logits;
  const Tensor loss = region_.rank() == 0 ? pass.loss : ignored();  // all know it, one enters it
  saved.lse = add_loss(loss, {max, rows.sum, rows.target_logit}, pass);
}
// [cross_entropy]

std::unique_ptr<Linear> make_column_parallel(std::vector<Parameter*> weights,
                                             std::string_view output_name,
                                             const TensorRegion& region) {
  for (Parameter* weight : weights) {
    if (weight->slices.empty()) region.share(*weight, 0);
  }
  return std::make_unique<ColumnParallelLinear>(std::move(weights), output_name, region);
}

std::unique_ptr<Linear> make_qkv_parallel(Parameter& q, Parameter& k, Parameter& v, int64_t G,
                                          const TensorRegion& region) {
  for (Parameter* weight : {&k, &v}) region.share_kv_heads(*weight, G);
  return make_column_parallel({&q, &k, &v}, "qkv", region);
}

std::unique_ptr<Linear> make_row_parallel(Parameter& weight, const TensorRegion& region,
                                          bool ends_block) {
  region.share(weight, 1);
  return std::make_unique<RowParallelLinear>(weight, "residual", region, ends_block);
}

Tensor gather_vocabulary(const Tensor& logits, int64_t vocab_size, const Communicator& tp) {
  const int64_t B = logits.size(0), t = tp.size(), widest = (vocab_size + t - 1) / t;
  const Tensor own = Tensor::zeros({B, widest}, logits.dtype());
  ops::copy(own.narrow(1, 0, logits.size(1)), logits);
  const Tensor parts = Tensor::empty({t, B, widest}, logits.dtype());
  tp.all_gather(parts, own);
  const Tensor whole = Tensor::empty({B, vocab_size}, logits.dtype());
  for (int64_t r = 0; r < t; ++r) {
    const auto [begin, count] = cut(vocab_size, r, t);
    ops::copy(whole.narrow(1, begin, count),
              parts.narrow(0, r, 1).view({B, widest}).narrow(1, 0, count));
  }
  return whole;
}

Footprint ColumnParallelLinear::footprint(const PassShape& shape) const {
  Footprint result = Linear::footprint(shape);
  if (!region_.shares_rows() || region_.gathers_again()) return result;
  const int64_t I = parameters()[0]->local_shape()[1];
  result.kept = {{"gathered", shape.tokens() * I * shape.own()}};
  result.keeps_x = false;
  return result;
}

Footprint RowParallelLinear::footprint(const PassShape& shape) const {
  Footprint result = Linear::footprint(shape);
  if (region_.shares_rows()) result.output.bytes /= region_.size();
  return result;
}

Footprint VocabParallelEmbedding::footprint(const PassShape& shape) const {
  Footprint result = Embedding::footprint(shape);
  if (region_.shares_rows()) result.output.bytes /= region_.size();
  return result;
}

}  // namespace usp
