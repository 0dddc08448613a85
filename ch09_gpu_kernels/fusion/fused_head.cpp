#include "fusion/fused_head.h"

#include "tensor/fused_ops.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// A loss that nobody reads.
Tensor unread() {
  const CategoryScope scope(Category::workspace);
  return Tensor::zeros({1}, DType::f64);
}

}  // namespace

// [gradients]
/// One backward pass: what it reads, and what it leaves.
struct FusedHead::Gradients {
  Tensor x, lse, targets;  // [T, H], [T], [T]
  double scale;
  const Parameter& table;
  Tensor dx = {};       // [T, H], once computed
  Tensor dlogits = {};  // [T, V], where the weight's gradient waits for later

  /// Both gradients, a few rows of the logits at a time.
  void both(int64_t rows, bool accumulate) {
    dx = Tensor::empty(x.shape(), x.dtype());
    ops::linear_cross_entropy_backward(dx, table.grad, x, table.value, targets, lse,
                                       table.offset(0), scale, rows, accumulate);
  }
  /// dx now, and what the weight's gradient will be computed from.
  void input_alone() {
    dx = Tensor::empty(x.shape(), x.dtype());
    dlogits = Tensor::empty({x.size(0), table.value.size(0)}, x.dtype());
    ops::linear_cross_entropy_backward_input(dx, dlogits, x, table.value, targets, lse,
                                             table.offset(0), scale);
  }
  void weight_alone(bool accumulate) const {
    ops::linear_backward_weight(table.grad, dlogits, x, accumulate);
  }
};
// [gradients]

FusedHead::FusedHead(RmsNorm norm, std::unique_ptr<Linear> lm_head, Parameter& table,
                     const TensorRegion& region, int64_t rows)
    : FusedHead(norm, *lm_head, std::move(lm_head), table, region, rows) {}

FusedHead::FusedHead(RmsNorm norm, const Linear& linear, std::unique_ptr<Linear>&& lm_head,
                     Parameter& table, const TensorRegion& region, int64_t rows)
    : Head(norm, std::move(lm_head), nullptr),
      norm_(norm),
      lm_head_(&linear),
      table_(&table),
      region_(region),
      rows_(rows) {}

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
  const Shape rows{x.size(0)};
  const DType acc = accumulate_dtype(x.dtype());
  const Tensor own_max = Tensor::empty(rows, acc), sum = Tensor::empty(rows, acc);
  const Tensor target_logit = Tensor::empty(rows, acc);
  ops::linear_cross_entropy_forward(own_max, sum, target_logit, x, table_->value, pass.targets,
                                    table_->offset(0), rows_);
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
  const auto gradients = std::make_shared<Gradients>(
      Gradients{x, std::move(kept.lse), pass.targets, pass.loss_scale, *table_});
  grads.add({table_}, [gradients, rows = rows_](bool accumulate) {
    gradients->dlogits.defined() ? gradients->weight_alone(accumulate)
                                 : gradients->both(rows, accumulate);
  });
  if (!gradients->dx.defined()) gradients->input_alone();  // it was put off
  const Tensor dnormed = sum_over_ranks(std::exchange(gradients->dx, {}));
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
