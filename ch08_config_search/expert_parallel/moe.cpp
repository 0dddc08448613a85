#include "expert_parallel/moe.h"

#include <algorithm>
#include <numeric>

#include "expert_parallel/node_dispatch.h"
#include "tensor/runtime.h"

namespace usp {

const ExpertGroup& Mixture::away() const { return nodes() != nullptr ? nodes()->between : experts; }

const ExpertGroup& Mixture::at_experts() const {
  return nodes() != nullptr ? nodes()->within : experts;
}

GroupedLinear::GroupedLinear(std::vector<Parameter*> weights, int64_t experts,
                             std::string_view output_name)
    : weights_(std::move(weights)), experts_(experts), output_name_(output_name) {
  for (Parameter* weight : weights_) ++weight->uses;
}

Tensor GroupedLinear::of_experts(Tensor Parameter::*member) const {
  const Tensor all = stacked(weights_, member);
  return all.view({experts_, all.size(0) / experts_, all.size(1)});
}

Tensor GroupedLinear::forward(const Tensor& x, const std::vector<int64_t>& counts,
                              Saved& saved) const {
  saved.x = x;
  const Tensor w = of_experts(&Parameter::value);
  Tensor y = Tensor::empty({x.size(0), w.size(1)}, x.dtype(), output_name_);  // [Q, O]
  ops::grouped_linear_forward(y, x, w, counts);
  return y;
}

Tensor GroupedLinear::backward_input(const Tensor& dy, const std::vector<int64_t>& counts) const {
  const Tensor w = of_experts(&Parameter::value);
  Tensor dx = Tensor::empty({dy.size(0), w.size(2)}, dy.dtype());  // [Q, I]
  ops::grouped_linear_backward_input(dx, dy, w, counts);
  return dx;
}

void GroupedLinear::backward_weight(const Tensor& dy, const std::vector<int64_t>& counts,
                                    const Saved& saved, Grads& grads) const {
  // An expert without rows takes part: its gradient is 0, and is expected like any other.
  grads.add(weights_, [this, dy, x = saved.x, counts](bool accumulate) {
    ops::grouped_linear_backward_weight(of_experts(&Parameter::grad), dy, x, counts, accumulate);
  });
}

namespace {

/// The input of the shared experts, and the gradient of it that they return.
struct SharedInput {
  Tensor x;  ///< [T, H]
};
struct SharedOutput {
  Tensor y;  ///< [T, H]
};

}  // namespace

Dispatch::Dispatch(RmsNorm norm, Router router, const Mixture& mixture)
    : norm_(norm), router_(std::move(router)), mixture_(mixture) {}

Tensor Dispatch::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  Routing& routing = saved.emplace<Routing>();
  if (saved.has<Decided>()) {
    Decided decided = saved.take<Decided>();
    routing = decided.routing;
    kept.router.load = decided.load;
  }
  // [rows_leave]
  const Tensor normed = norm_.forward(x, kept.norm);
  const bool splits = mixture_.splits();
  const Tensor tokens = splits ? mixture_.region.enter(normed, pass).wait() : normed;  // [T, H]
  router_.forward(tokens, kept.router, routing, pass);
  const Tensor rows = Tensor::empty({routing.rows.sent(), x.size(1)}, x.dtype(), "dispatched");
  ops::permute(rows, tokens, routing.slots);  // [R, H]
  saved.emplace<ToExperts>().rows = mixture_.away().to_experts(rows, routing.rows, mixture_.region);
  saved.emplace<SharedInput>().x = normed;
  // [rows_leave]
  return x;
}

Tensor Dispatch::backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const Routing routing = saved.take<Routing>();
  Tensor dnormed = router_.backward(saved.take<GateGradient>().dgates, kept.router, routing, grads,
                                    pass);  // [T, H]
  ops::unpermute(dnormed, saved.take<FromExperts>().rows.wait(), routing.slots, /*gates=*/{},
                 /*accumulate=*/true);  // + each row's gradient at its token
  if (mixture_.splits()) dnormed = mixture_.region.enter_backward(dnormed).wait();
  if (saved.has<SharedInput>()) ops::add(dnormed, dnormed, saved.take<SharedInput>().x);
  return norm_.backward(dnormed, kept.norm, grads, /*dresidual=*/dy);
}

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

Experts::Experts(GroupedLinear gate_up_proj, GroupedLinear down_proj,
                 std::optional<FeedForward> shared, const Mixture& mixture)
    : gate_up_proj_(std::move(gate_up_proj)),
      down_proj_(std::move(down_proj)),
      shared_(std::move(shared)),
      mixture_(mixture) {}

// [experts_forward]
Tensor Experts::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  Saved& kept = saved.emplace<Saved>();
  const RowCounts& counts = saved.get<Routing>().at_experts();
  const SharedInput shared = saved.take<SharedInput>();
  if (shared_) {  // while tokens travel
    saved.emplace<SharedOutput>().y = shared_->forward(shared.x, kept.shared, pass);
  }
  Tensor rows = saved.take<ToExperts>().rows.wait();  // [Q, H]
  rows = mixture_.at_experts().by_expert(rows, counts);
  kept.gate_up = gate_up_proj_.forward(rows, counts.of_expert, kept.gate_up_proj);  // [Q, 2F]
  const Shape hidden_shape{kept.gate_up.size(0), kept.gate_up.size(1) / 2};
  const Tensor hidden = Tensor::empty(hidden_shape, x.dtype(), "swiglu");  // [Q, F]
  ops::swiglu_forward(hidden, kept.gate_up);
  rows = down_proj_.forward(hidden, counts.of_expert, kept.down_proj);  // [Q, H]
  rows = mixture_.at_experts().by_rank(rows, counts);
  saved.emplace<FromExperts>().rows =
      mixture_.at_experts().from_experts(rows, counts, mixture_.region);
  return x;
}
// [experts_forward]

Tensor Experts::backward(const Tensor& dy, BlockSaved& saved, Grads& grads, const Pass& pass) {
  Saved kept = saved.take<Saved>();
  const RowCounts& counts = saved.get<Routing>().at_experts();
  if (shared_) {
    saved.emplace<SharedInput>().x = shared_->backward(dy, kept.shared, grads, pass);
  }
  Tensor dy_rows = saved.take<ToExperts>().rows.wait();  // [Q, H]
  dy_rows = mixture_.at_experts().by_expert(dy_rows, counts);
  const Tensor dhidden = down_proj_.backward_input(dy_rows, counts.of_expert);
  const Tensor dgate_up = kept.gate_up;  // read here for the last time, so overwritten
  ops::swiglu_backward(dgate_up, dhidden, kept.gate_up);
  Tensor drows = gate_up_proj_.backward_input(dgate_up, counts.of_expert);
  drows = mixture_.at_experts().by_rank(drows, counts);
  saved.emplace<FromExperts>().rows =
      mixture_.at_experts().from_experts(drows, counts, mixture_.region);
  // While the rows' gradients travel to the ranks of their tokens.
  down_proj_.backward_weight(dy_rows, counts.of_expert, kept.down_proj, grads);
  gate_up_proj_.backward_weight(dgate_up, counts.of_expert, kept.gate_up_proj, grads);
  return dy;
}

// [combine_forward]
Tensor Combine::forward(const Tensor& x, BlockSaved& saved, const Pass& pass) {
  const Routing& routing = saved.get<Routing>();
  const Tensor rows = saved.take<FromExperts>().rows.wait();  // [R, H]
  if (!routing.in_node) saved.emplace<Saved>().rows = rows;
  const SharedOutput shared =
      saved.has<SharedOutput>() ? saved.take<SharedOutput>() : SharedOutput{};
  if (pass.mode == Pass::Mode::recompute) return {};  // the block ends here, and nobody reads y
  Tensor y = Tensor::empty({routing.choices.size(0), x.size(1)}, x.dtype(), "residual");
  const Tensor gates = routing.in_node ? Tensor() : routing.gates;
  if (mixture_.splits()) {
    ops::unpermute(y, rows, routing.slots, gates);
    y = mixture_.region.leave(y, pass).wait();
    ops::add(y, x, y);
  } else {
    ops::unpermute_onto(y, x, rows, routing.slots, gates);
  }
  if (shared.y.defined()) ops::add(y, y, shared.y);
  return y;
}
// [combine_forward]

Tensor Combine::backward(const Tensor& dy, BlockSaved& saved, Grads&, const Pass&) {
  const Routing& routing = saved.get<Routing>();
  const bool splits = mixture_.splits();
  const Tensor dtokens = splits ? mixture_.region.leave_backward(dy).wait() : dy;  // [T, H]
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
  saved.emplace<ToExperts>().rows =
      mixture_.away().to_experts(drows, routing.rows, mixture_.region);
  return dy;
}

int64_t GroupedLinear::outputs() const {
  int64_t rows = 0;
  for (const Parameter* weight : weights_) rows += weight->local_shape()[0];
  return rows / experts_;
}

MixtureBytes::MixtureBytes(const Mixture& mixture, const PassShape& shape) {
  const ExpertShape& experts = mixture.shape;
  const int64_t T = mixture.splits() ? shape.tokens() : shape.rows();
  const int64_t k = experts.num_experts_per_tok, H = mixture.hidden_size;
  const auto of_width = [](const EvenRows& rows, int64_t bytes, const ExpertGroup& ranks) {
    return Exchange{rows.sent * bytes, rows.received * bytes, ranks.size() > 1};
  };
  own = shape.rows() * H * shape.own();
  tokens = T * H * shape.own();
  gates_by_node = {};
  if (mixture.nodes() == nullptr) {
    const EvenRows rows = even_rows(T * k, experts.num_experts, mixture.experts);
    away = at_experts = of_width(rows, H * shape.own(), mixture.experts);
    return;
  }
  const EvenRows copies = even_copies(T, k, *mixture.nodes());
  const int64_t of_node = experts.num_experts / mixture.away().size();
  away = of_width(copies, H * shape.own(), mixture.away());
  gates_by_node = of_width(copies, k * shape.acc(), mixture.away());
  const int64_t choices = choices_in_node(T, k, *mixture.nodes());
  at_experts = of_width(even_rows(choices, of_node, mixture.at_experts()), H * shape.own(),
                        mixture.at_experts());
}

Footprint Dispatch::footprint(const PassShape& shape) const {
  const Footprint norm = norm_.footprint(shape), router = router_.footprint(shape);
  const int64_t tokens = MixtureBytes(mixture_, shape).tokens;
  Footprint result{.kept_through_recompute = router.kept_through_recompute};
  result.keep(norm.kept, mixture_.splits() ? NamedBytes{"gathered", tokens} : norm.output);
  result.keep(router.kept);
  return result;
}

Footprint Experts::footprint(const PassShape& shape) const {
  const MixtureBytes b(mixture_, shape);
  const int64_t received = b.at_experts.received;
  const int64_t gate_up = received / mixture_.hidden_size * gate_up_proj_.outputs();
  Footprint result;
  if (shared_) {
    const Footprint shared = shared_->footprint(shape);
    const bool own_x = mixture_.splits() && shared.keeps_x;  // else Dispatch keeps it
    result.keep(shared.kept, own_x ? NamedBytes{"norm", b.own} : NamedBytes{});
  }
  result.keep({{b.at_experts.travels ? "regrouped" : "dispatched", received},
               {"gate_up", gate_up},
               {"swiglu", gate_up / 2}});
  return result;
}

Footprint Combine::footprint(const PassShape& shape) const {
  const MixtureBytes b(mixture_, shape);
  Footprint result{.output = {"residual", b.own}};
  if (mixture_.nodes() == nullptr) {
    result.keep({{b.away.travels ? "exchanged" : "expert output", b.away.sent}});
  }
  return result;
}

}  // namespace usp
