#include "moe.h"

#include "tensor/runtime.h"

namespace usp {

GroupedLinear::GroupedLinear(std::vector<Parameter*> weights, int64_t experts,
                             std::string_view output_name)
    : weights_(std::move(weights)), experts_(experts), output_name_(output_name) {
  for (Parameter* weight : weights_) ++weight->uses;
}

Tensor GroupedLinear::of_experts(Tensor Parameter::*member) const {
  const Tensor all = stacked(weights_, member);
  return all.view({experts_, all.size(0) / experts_, all.size(1)});
}

// [grouped]
Tensor GroupedLinear::forward(const Tensor& x, const std::vector<int64_t>& counts,
                              Saved& saved) const {
  saved.x = x;
  const Tensor w = of_experts(&Parameter::value);
  Tensor y = Tensor::empty({x.size(0), w.size(1)}, x.dtype(), output_name_);  // [Q, O]
  ops::grouped_linear_forward(y, x, w, counts);
  return y;
}

Tensor GroupedLinear::backward(const Tensor& dy, const std::vector<int64_t>& counts, Saved& saved,
                               Grads& grads) const {
  const Tensor w = of_experts(&Parameter::value);
  Tensor dx = Tensor::empty({dy.size(0), w.size(2)}, dy.dtype());  // [Q, I]
  ops::grouped_linear_backward_input(dx, dy, w, counts);
  // An expert without rows takes part: its gradient is 0, and is expected like any other.
  grads.add(weights_, [this, dy, x = saved.x, counts](bool accumulate) {
    ops::grouped_linear_backward_weight(of_experts(&Parameter::grad), dy, x, counts, accumulate);
  });
  return dx;
}
// [grouped]

namespace {

/// The input of the shared experts, and the gradient of it that they return.
struct SharedInput {
  Tensor x;  ///< [T, H]
};
struct SharedOutput {
  Tensor y;  ///< [T, H]
};

/// Whether the ranks of tp share out each expert, and so work on the same tokens.
bool splits_experts(const ExpertGroup& experts, const TensorRegion& region) {
  return experts.config().expert_tp && region.size() > 1;
}

}  // namespace

Dispatch::Dispatch(RmsNorm norm, Router router, const ExpertGroup& experts,
                   const TensorRegion& region)
    : norm_(norm), router_(std::move(router)), experts_(experts), region_(region) {}

// [dispatch]
Tensor Dispatch::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  Routing& routing = saved.emplace<Routing>();
  if (saved.has<Decided>()) {
    Decided decided = saved.take<Decided>();
    routing = decided.routing;
    kept.router.load = decided.load;
  }
  const Tensor normed = norm_.forward(x, kept.norm);
  const bool splits = splits_experts(experts_, region_);
  const Tensor tokens = splits ? region_.enter(normed, pass).wait() : normed;  // [T, H]
  router_.forward(tokens, kept.router, routing, pass);
  const Tensor rows = Tensor::empty({routing.rows.sent(), x.size(1)}, x.dtype(), "dispatched");
  ops::permute(rows, tokens, routing.slots);  // [R, H]
  saved.emplace<ToExperts>().rows = experts_.to_experts(rows, routing.rows, region_);
  saved.emplace<SharedInput>().x = normed;
  return x;
}

Tensor Dispatch::backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const Routing routing = saved.take<Routing>();
  const Tensor dgates = saved.take<GateGradient>().dgates;
  Tensor dnormed = router_.backward(dgates, kept.router, routing, grads, pass);  // [T, H]
  const Tensor drows = saved.take<FromExperts>().rows.wait();                    // [R, H]
  ops::unpermute(dnormed, drows, routing.slots, /*gates=*/{}, /*accumulate=*/true);
  if (splits_experts(experts_, region_)) dnormed = region_.enter_backward(dnormed).wait();
  if (const Tensor shared = saved.take<SharedInput>().x; shared.defined()) {
    ops::add(dnormed, dnormed, shared);
  }
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/dy);
}
// [dispatch]

// [keep]
void Dispatch::keep_through_recompute(BlockSaved& saved, BlockSaved& kept) const {
  const auto without_gates = [](Routing routing) {
    routing.gates = {};
    return routing;
  };
  Routing routing = without_gates(saved.get<Routing>());
  if (routing.in_node) {
    routing.in_node = std::make_shared<Routing>(without_gates(*routing.in_node));
  }
  kept.emplace<Decided>() = {routing, saved.get<Saved>().router.load};
}
// [keep]

Experts::Experts(GroupedLinear gate_up_proj, GroupedLinear down_proj,
                 std::optional<FeedForward> shared, const ExpertGroup& experts,
                 const TensorRegion& region)
    : gate_up_proj_(std::move(gate_up_proj)),
      down_proj_(std::move(down_proj)),
      shared_(std::move(shared)),
      experts_(experts),
      region_(region) {}

// [experts]
Tensor Experts::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  const RowCounts& counts = saved.get<Routing>().at_experts();
  const Tensor shared = saved.take<SharedInput>().x;
  if (shared_) {  // while tokens travel
    saved.emplace<SharedOutput>().y = shared_->forward(shared, kept.shared, pass);
  }
  const Tensor arrived = saved.take<ToExperts>().rows.wait();  // [Q, H]
  const Tensor rows = experts_.by_expert(arrived, counts);
  kept.gate_up = gate_up_proj_.forward(rows, counts.of_expert, kept.gate_up_proj);  // [Q, 2F]
  const Shape hidden_shape{kept.gate_up.size(0), kept.gate_up.size(1) / 2};
  const Tensor hidden = Tensor::empty(hidden_shape, x.dtype(), "swiglu");  // [Q, F]
  ops::swiglu_forward(hidden, kept.gate_up);
  const Tensor outputs = down_proj_.forward(hidden, counts.of_expert, kept.down_proj);  // [Q, H]
  saved.emplace<FromExperts>().rows =
      experts_.from_experts(experts_.by_rank(outputs, counts), counts, region_);
  return x;
}

Tensor Experts::backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const RowCounts& counts = saved.get<Routing>().at_experts();
  Tensor& dshared = saved.emplace<SharedInput>().x;
  if (shared_) dshared = shared_->backward(dy, kept.shared, grads, pass);
  const Tensor arrived = saved.take<ToExperts>().rows.wait();  // [Q, H]
  const Tensor doutputs = experts_.by_expert(arrived, counts);
  const Tensor dhidden = down_proj_.backward(doutputs, counts.of_expert, kept.down_proj, grads);
  const Tensor dgate_up = kept.gate_up;  // read here for the last time, so overwritten
  ops::swiglu_backward(dgate_up, dhidden, kept.gate_up);
  const Tensor drows = gate_up_proj_.backward(dgate_up, counts.of_expert, kept.gate_up_proj, grads);
  saved.emplace<FromExperts>().rows =
      experts_.from_experts(experts_.by_rank(drows, counts), counts, region_);
  return dy;
}
// [experts]

Combine::Combine(const ExpertGroup& experts, const TensorRegion& region)
    : experts_(experts), region_(region) {}

// [combine]
Tensor Combine::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  const Routing& routing = saved.get<Routing>();
  const Tensor rows = saved.take<FromExperts>().rows.wait();  // [R, H]
  Tensor y = Tensor::empty({routing.choices.size(0), x.size(1)}, x.dtype(), "residual");
  ops::unpermute(y, rows, routing.slots, routing.in_node ? Tensor() : routing.gates);
  if (!routing.in_node) saved.emplace<Saved>().rows = rows;
  if (splits_experts(experts_, region_)) y = region_.leave(y, pass).wait();
  ops::add(y, x, y);
  if (saved.has<SharedOutput>()) ops::add(y, y, saved.take<SharedOutput>().y);
  return y;
}

Tensor Combine::backward(const Tensor& dy, BlockSaved& saved, Grads&, const Pass&) {
  const Routing& routing = saved.get<Routing>();
  const bool splits = splits_experts(experts_, region_);
  const Tensor dtokens = splits ? region_.leave_backward(dy).wait() : dy;  // [T, H]
  Tensor drows;
  if (routing.in_node) {
    drows = Tensor::empty({routing.rows.sent(), dy.size(1)}, dy.dtype());
    ops::permute(drows, dtokens, routing.slots);
  } else {
    const Tensor rows = saved.take<Saved>().rows;
    drows = rows;  // read here for the last time, so overwritten
    Tensor& dgates = saved.emplace<GateGradient>().dgates;
    dgates = Tensor::empty(routing.gates.shape(), routing.gates.dtype());
    ops::unpermute_backward(drows, dgates, dtokens, rows, routing.slots, routing.gates);
  }
  saved.emplace<ToExperts>().rows = experts_.to_experts(drows, routing.rows, region_);
  return dy;
}
// [combine]

}  // namespace usp
