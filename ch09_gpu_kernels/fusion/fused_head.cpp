#include "fusion/fused_head.h"

#include <algorithm>

#include "tensor/runtime.h"

namespace usp {

namespace {

/// use(begin, count) for rows [begin, begin + count) of T, this many at once.
template <class Use>
void each_chunk(int64_t T, int64_t at_once, const Use& use) {
  for (int64_t begin = 0; begin < T; begin += at_once) use(begin, std::min(at_once, T - begin));
}

/// A loss that nobody reads.
Tensor unread() {
  const CategoryScope scope(Category::workspace);
  return Tensor::zeros({1}, DType::f64);
}

}  // namespace

// [chunks]
/// One backward pass: what it reads, and what it leaves.
struct FusedHead::Chunks {
  Tensor x, lse, targets;  // [T, H], [T], [T]
  double scale;
  const Parameter& table;
  int64_t at_once;
  Tensor dx = {};       // [T, H], once computed
  Tensor dlogits = {};  // [T, V], where the weight's gradient waits for later

  /// Rows [begin, begin + count) of the logits once more, and their gradient in the same memory.
  void gradient_of_rows(const Tensor& rows, int64_t begin, int64_t count) const {
    {
      const RecomputeScope again;
      ops::linear_forward(rows, x.narrow(0, begin, count), table.value);
    }
    ops::cross_entropy_backward(rows, rows, targets.narrow(0, begin, count),
                                lse.narrow(0, begin, count), table.offset(0), scale);
    ops::linear_backward_input(dx.narrow(0, begin, count), rows, table.value);
  }

  /// Both gradients, while a chunk of the logits is there.
  void both(bool accumulate) {
    dx = Tensor::empty(x.shape(), x.dtype());
    each_chunk(x.size(0), at_once, [&](int64_t begin, int64_t count) {
      const Tensor rows = Tensor::empty({count, table.value.size(0)}, x.dtype());
      gradient_of_rows(rows, begin, count);
      ops::linear_backward_weight(table.grad, rows, x.narrow(0, begin, count),
                                  accumulate || begin > 0);
    });
  }
  /// dx now, and what the weight's gradient will be computed from.
  void input_alone() {
    dx = Tensor::empty(x.shape(), x.dtype());
    dlogits = Tensor::empty({x.size(0), table.value.size(0)}, x.dtype());
    gradient_of_rows(dlogits, 0, x.size(0));
  }
  void weight_alone(bool accumulate) const {
    ops::linear_backward_weight(table.grad, dlogits, x, accumulate);
  }
};
// [chunks]

FusedHead::FusedHead(RmsNorm norm, std::unique_ptr<Linear> lm_head, Parameter& table,
                     const TensorRegion& region, int64_t rows)
    : Head(norm, std::move(lm_head), nullptr), table_(&table), region_(region), rows_(rows) {}

Tensor FusedHead::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  const Tensor normed = norm_.forward(x, kept.norm);
  const Tensor all = enter(normed, pass);  // [T, H]
  kept.x = region_.gathers_again() ? normed : all;
  kept.lse = add_loss(all, pass);
  return {};
}

Tensor FusedHead::enter(const Tensor& x, const Pass& pass) const {
  if (!region_.in_chunks() || !region_.shares_rows(pass)) return region_.enter(x, pass).wait();
  const Tensor all = Tensor::empty({x.size(0) * region_.size(), x.size(1)}, x.dtype(), "gathered");
  region_.gather_in_chunks(x, [&](int64_t begin, int64_t count, const Tensor& rows) {
    ops::copy(all.narrow(0, begin, count), rows);
  });
  return all;
}

// [add_loss]
Tensor FusedHead::add_loss(const Tensor& x, const Pass& pass) const {
  const TraceScope trace("linear_cross_entropy");
  const Shape rows{x.size(0)};
  const DType acc = accumulate_dtype(x.dtype());
  const Tensor own_max = Tensor::empty(rows, acc), sum = Tensor::empty(rows, acc);
  const Tensor target_logit = Tensor::empty(rows, acc);
  each_chunk(x.size(0), rows_, [&](int64_t begin, int64_t count) {
    const auto part = [&](const Tensor& of) { return of.narrow(0, begin, count); };
    const Tensor logits = Tensor::empty({count, table_->value.size(0)}, x.dtype());
    ops::linear_forward(logits, part(x), table_->value);
    ops::cross_entropy_forward(part(own_max), part(sum), part(target_logit), logits,
                               part(pass.targets), table_->offset(0));
  });
  const Tensor max = Tensor::empty(rows, acc), lse = Tensor::empty(rows, acc, "lse");
  ops::copy(max, own_max);
  region_.reduce(max, ReduceOp::max);
  ops::cross_entropy_rescale(sum, own_max, max);
  region_.reduce(sum);
  region_.reduce(target_logit);  // 0 on every rank but the one that has the target
  const Tensor loss = region_.rank() == 0 ? pass.loss : unread();  // all know it, one enters it
  ops::cross_entropy_loss(loss, lse, max, sum, target_logit, pass.loss_scale);
  return lse;
}
// [add_loss]

// [backward]
Tensor FusedHead::backward(const Tensor&, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const Tensor x = region_.gathers_again() ? region_.gather(kept.x).wait() : kept.x;
  const auto chunks = std::make_shared<Chunks>(
      Chunks{x, std::move(kept.lse), pass.targets, pass.loss_scale, *table_, rows_});
  {
    const TraceScope trace("linear_cross_entropy");
    grads.add({table_}, [chunks](bool accumulate) {
      chunks->dlogits.defined() ? chunks->weight_alone(accumulate) : chunks->both(accumulate);
    });
    if (!chunks->dx.defined()) chunks->input_alone();  // it was put off
  }
  const Tensor dnormed = sum_over_ranks(std::exchange(chunks->dx, {}));
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/{});
}
// [backward]

Tensor FusedHead::sum_over_ranks(const Tensor& dx) const {
  if (!region_.in_chunks()) return region_.enter_backward(dx).wait();
  const auto copy_rows = [&](int64_t begin, int64_t count, const Tensor& rows) {
    ops::copy(rows, dx.narrow(0, begin, count));
  };
  return region_.sum_in_chunks(dx.shape(), dx.dtype(), copy_rows, region_.shares_rows()).wait();
}

Footprint FusedHead::footprint(const PassShape& shape) const {
  const Footprint norm = norm_.footprint(shape), lm_head = lm_head_->footprint(shape);
  Footprint result;
  result.keep(norm.kept, lm_head.keeps_x ? norm.output : NamedBytes{});
  result.keep(lm_head.kept);
  result.keep({{"lse", shape.tokens() * shape.acc()}});
  return result;
}

}  // namespace usp
