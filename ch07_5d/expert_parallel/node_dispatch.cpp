#include "expert_parallel/node_dispatch.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "config.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// What a group of this many ranks knows of the run.
ExpertConfig direct_among(ExpertConfig config, int64_t ranks) {
  config.ep_size = ranks;
  config.dispatch = "direct";
  return config;
}

/// Ranks of ep on each node.
int64_t ranks_in_node(const Communicator& ep) {
  int in_node = 1;
  while (in_node < ep.size() && ep.node_of(in_node) == ep.node_of(0)) ++in_node;
  for (int r = 0; r < ep.size(); ++r) {
    const int first = r - r % in_node;
    USP_CHECK(ep.size() % in_node == 0 && ep.node_of(r) == ep.node_of(first) &&
                  (first == 0 || ep.node_of(first) != ep.node_of(first - 1)),
              "rank {} of ep lies on node {}, which has not {} of them like the first", r,
              ep.node_of(r), in_node);
  }
  return in_node;
}

ExpertGroup split(const ExpertConfig& config, const Communicator& ep, const char* name,
                  const std::function<int(int)>& colour_of) {
  const Communicator ranks = ep.split(name, colour_of);
  return ExpertGroup(direct_among(config, ranks.size()), ranks);
}

}  // namespace

// [groups]
NodeGroups::NodeGroups(const ExpertConfig& config, const Communicator& ep) {
  const int in_node = static_cast<int>(ranks_in_node(ep));
  between = split(config, ep, "ep_rail", [=](int r) { return r % in_node; });
  within = split(config, ep, "ep_node", [=](int r) { return r / in_node; });
}
// [groups]

namespace {

/// The copies of tokens that go to nodes.
struct NodeCopies {
  std::vector<int32_t> nodes;  ///< [T, k]: the node of each choice; -1: not the token's first there
  std::vector<int32_t> choices;  ///< [R, k]: of each copy, by node and token, those that its node
                                 ///< serves, by their numbers in the node; -1: all others
};

/// choices [T, k] of experts of which each of n nodes has this many.
NodeCopies copies_of(std::span<const int64_t> choices, int64_t k, int64_t n, int64_t of_node) {
  NodeCopies copies;
  copies.nodes.assign(choices.size(), -1);
  for (int64_t node = 0; node < n; ++node) {
    const int64_t first = node * of_node;
    const auto is_here = [=](int64_t choice) {
      return choice >= first && choice < first + of_node;
    };
    for (int64_t begin = 0; begin < std::ssize(choices); begin += k) {
      const auto token = choices.subspan(begin, k);
      const auto found = std::ranges::find_if(token, is_here);
      if (found == token.end()) continue;
      copies.nodes[begin + (found - token.begin())] = static_cast<int32_t>(node);
      for (int64_t choice : token) {
        copies.choices.push_back(is_here(choice) ? static_cast<int32_t>(choice - first) : -1);
      }
    }
  }
  return copies;
}

}  // namespace

// [route]
void route_by_node(Routing& routing, const Tensor& kept, int64_t E, const NodeGroups& nodes) {
  const int64_t T = kept.size(0), k = kept.size(1), n = nodes.between.size(), of_node = E / n;
  const bool known = kept.device() != Device::meta;
  const NodeCopies copies = known ? copies_of(kept.counts(), k, n, of_node) : NodeCopies();
  const auto as_tensor = [known](const std::vector<int32_t>& numbers, const Shape& shape) {
    return known ? Tensor::from_host(numbers, shape, "choices")
                 : Tensor::empty(shape, DType::i32, "choices");
  };
  Tensor to_nodes;
  {
    const CategoryScope small(Category::workspace);
    to_nodes = as_tensor(copies.nodes, {T, k});
  }
  assign_rows(routing, to_nodes, n, /*expected=*/even_copies(T, k, nodes).sent, nodes.between);
  const Tensor choices = as_tensor(copies.choices, {routing.rows.sent(), k});
  routing.in_node = std::make_shared<Routing>();
  Routing& here = *routing.in_node;
  here.choices = nodes.between.numbers_to_experts(choices, routing.rows);  // [C, k]
  const int64_t expected = choices_in_node(T, k, nodes);
  assign_rows(here, here.choices, of_node, expected, nodes.within);
}
// [route]

Tensor FanOut::forward(const Tensor& x, BlockSaved& saved, const Pass&) {
  const Routing& routing = saved.get<Routing>();
  const Routing& here = *routing.in_node;
  const Tensor gates =
      Tensor::empty({routing.rows.sent(), routing.gates.size(1)}, routing.gates.dtype(), "gates");
  ops::permute(gates, routing.gates, routing.slots);
  saved.emplace<GatesOnTheirWay>().gates =
      mixture_.away().to_experts(gates, routing.rows, mixture_.region);
  const Tensor copies = saved.take<ToExperts>().rows.wait();  // [C, H]
  const Tensor rows = Tensor::empty({here.rows.sent(), x.size(1)}, x.dtype(), "dispatched");
  ops::permute(rows, copies, here.slots);
  saved.emplace<ToExperts>().rows =
      mixture_.at_experts().to_experts(rows, here.rows, mixture_.region);
  return x;
}

Tensor FanOut::backward(const Tensor& dy, BlockSaved& saved, Grads&, const Pass&) {
  const Routing& routing = saved.get<Routing>();
  const Routing& here = *routing.in_node;
  const Tensor drows = saved.take<FromExperts>().rows.wait();
  const Tensor dcopies = Tensor::empty({here.choices.size(0), dy.size(1)}, dy.dtype());  // [C, H]
  ops::unpermute(dcopies, drows, here.slots, /*gates=*/{});
  saved.emplace<FromExperts>().rows =
      mixture_.away().from_experts(dcopies, routing.rows, mixture_.region);
  const Tensor of_copies = saved.take<GatesOnTheirWay>().gates.wait();  // [R, k]
  Tensor& dgates = saved.emplace<GateGradient>().dgates;
  dgates = Tensor::empty(routing.gates.shape(), routing.gates.dtype());
  ops::unpermute(dgates, of_copies, routing.slots, /*gates=*/{});
  return dy;
}

Tensor FanIn::forward(const Tensor& x, BlockSaved& saved, const Pass&) {
  const Routing& routing = saved.get<Routing>();
  Routing& here = *routing.in_node;
  Tensor& rows = saved.emplace<Saved>().rows;
  rows = saved.take<FromExperts>().rows.wait();
  here.gates = saved.take<GatesOnTheirWay>().gates.wait();  // [C, k]
  const Tensor sums = Tensor::empty({here.choices.size(0), x.size(1)}, x.dtype());
  ops::unpermute(sums, rows, here.slots, here.gates);  // [C, H]
  saved.emplace<FromExperts>().rows =
      mixture_.away().from_experts(sums, routing.rows, mixture_.region);
  return x;
}

Tensor FanIn::backward(const Tensor& dy, BlockSaved& saved, Grads&, const Pass&) {
  const Routing& routing = saved.get<Routing>();
  Routing& here = *routing.in_node;
  const Tensor gates = std::exchange(here.gates, {});
  const Tensor rows = saved.take<Saved>().rows;
  const Tensor dsums = saved.take<ToExperts>().rows.wait();  // [C, H]
  const Tensor dgates = Tensor::empty(gates.shape(), gates.dtype());
  const Tensor& drows = rows;  // read here for the last time, so overwritten
  ops::unpermute_backward(drows, dgates, dsums, rows, here.slots, gates);
  saved.emplace<ToExperts>().rows =
      mixture_.at_experts().to_experts(drows, here.rows, mixture_.region);
  saved.emplace<GatesOnTheirWay>().gates =
      mixture_.away().from_experts(dgates, routing.rows, mixture_.region);
  return dy;
}

EvenRows even_copies(int64_t tokens, int64_t k, const NodeGroups& nodes) {
  const int64_t n = nodes.between.size();
  return even_rows(tokens * std::min(k, n), n, nodes.between);
}

int64_t choices_in_node(int64_t tokens, int64_t k, const NodeGroups& nodes) {
  return k * std::min(tokens, even_copies(tokens, k, nodes).received);
}

Footprint FanIn::footprint(const PassShape& shape) const {
  const MixtureBytes b(mixture_, shape);
  const auto& [in_node, gates] = std::tie(b.at_experts, b.gates_by_node);
  return {.kept = {{in_node.travels ? "exchanged" : "expert output", in_node.sent},
                   {gates.travels ? "exchanged" : "gates", gates.received}}};
}

// [traffic]
DispatchRows rows_on_their_way(std::span<const int64_t> choices, int64_t k, int64_t E, int64_t rank,
                               int64_t ep, int64_t in_node, bool by_node) {
  DispatchRows rows;
  const int64_t node = rank / in_node;
  for (int64_t begin = 0; begin < std::ssize(choices); begin += k) {
    std::vector<bool> seen(ep / in_node);
    for (int64_t choice : choices.subspan(begin, k)) {
      if (choice < 0) continue;
      const int64_t to = choice / (E / ep), there = to / in_node;
      if (!by_node) {
        if (to != rank) ++(there != node ? rows.between_nodes : rows.in_nodes);
        continue;
      }
      if (there != node && !seen[there]) ++rows.between_nodes;
      seen[there] = true;
      if (to % in_node != rank % in_node) ++rows.in_nodes;  // from the rail's end
    }
  }
  return rows;
}
// [traffic]

}  // namespace usp
