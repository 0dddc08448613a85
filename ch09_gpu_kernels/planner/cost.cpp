#include "planner/cost.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace usp {

std::string_view name(Resource resource) {
  constexpr std::array<std::string_view, kResources> kNames = {"peak", "bandwidth", "node",
                                                               "net",  "latency",   "launch"};
  return kNames[size_t(resource)];
}

GroupLayout layout_of(const std::vector<int>& members, int64_t ranks_per_node) {
  std::map<int64_t, int64_t> in_node;
  for (int rank : members) ++in_node[rank / ranks_per_node];
  GroupLayout layout{std::ssize(members), std::ssize(in_node), std::ssize(members)};
  for (const auto& [node, ranks] : in_node) layout.in_node = std::min(layout.in_node, ranks);
  return layout;
}

GroupLayout layout_of(int64_t ranks, int64_t distance, int64_t ranks_per_node) {
  if (ranks == 1) return {};
  if (distance >= ranks_per_node && distance % ranks_per_node == 0) return {ranks, ranks, 1};
  if (ranks_per_node % distance == 0) {
    const int64_t in_node = ranks_per_node / distance;
    const int64_t nodes = (ranks + in_node - 1) / in_node;
    return {ranks, nodes, ranks - (nodes - 1) * in_node};
  }
  std::vector<int> members;
  for (int64_t i = 0; i < ranks; ++i) members.push_back(static_cast<int>(i * distance));
  return layout_of(members, ranks_per_node);
}

double Cost::take(const char* key, const Sourced& number, std::string_view of) {
  for (size_t i = 0; i < count_; ++i) {
    if (taken_[i] == &number) return number.value;
  }
  if (number.origin == Origin::unknown) {
    usage_error("{}: {}{}{} is unknown: {}; choose a layout that does without it, or name it there",
                cluster_.name, key, of.empty() ? "" : ".", of, number.from);
  }
  taken_.at(count_++) = &number;
  return number.value;
}

std::map<Origin, int> Cost::origins() const {
  std::map<Origin, int> count;
  for (size_t i = 0; i < count_; ++i) ++count[taken_[i]->origin];
  return count;
}

// [efficiency]
/// The share of the peak that a product reaches: less where m, n or k is short.
double Cost::efficiency(const Kernel& kernel) {
  const double width = take("half_width", cluster_.half_width);
  const double depth = take("half_depth", cluster_.half_depth);
  const auto narrow = double(std::min(kernel.m, kernel.n)), k = double(kernel.k);
  return take("matmul", cluster_.matmul) * narrow / (narrow + width) * k / (k + depth);
}
// [efficiency]

// [kernel]
double Cost::of(const Kernel& kernel) { return std::max(moved(kernel), multiplied(kernel)); }

Resource Cost::limit(const Kernel& kernel) {
  return multiplied(kernel) > moved(kernel) ? Resource::peak : Resource::bandwidth;
}

double Cost::moved(const Kernel& kernel) {
  return double(kernel.bytes) /
         (take("memory_gbs", cluster_.memory_gbs) * 1e9 * take("memory", cluster_.memory));
}

double Cost::multiplied(const Kernel& kernel) {
  if (kernel.flops == 0) return 0;
  const auto peak = cluster_.peak_tflops.find(kernel.dtype);
  if (peak == cluster_.peak_tflops.end()) {
    usage_error("{}: peak_tflops has no {}; add \"{}\" there, or choose another --dtype",
                cluster_.name, name(kernel.dtype), name(kernel.dtype));
  }
  const double reached = kernel.kind == KernelKind::matmul ? efficiency(kernel)
                                                           : take("attention", cluster_.attention);
  return double(kernel.flops) /
         (take("peak_tflops", peak->second, name(kernel.dtype)) * 1e12 * reached);
}

double Cost::launch() { return take("launch", cluster_.launch_us) * 1e-6; }
// [kernel]

// [links]
/// Share of a node's NICs that each rank has. It does not depend on who sends: the ranks of a
/// node do the same at the same time. It shrinks with the nodes that a group lies on.
double Cost::net_share(int64_t nodes) {
  const double each = cluster_.per_doubling.value;
  const double left = each == 1 || nodes <= 2 ? 1 : std::pow(each, std::log2(double(nodes) / 2));
  return take("net.gbs", cluster_.net.gbs) * 1e9 * left *
         take("nics_per_node", cluster_.nics_per_node) /
         take("ranks_per_node", cluster_.ranks_per_node);
}

/// A ring leaves each node once; as many rings as the group has ranks in a node share the work.
double Cost::ring_rate(const GroupLayout& layout, bool sums, Resource& link) {
  const double faster = sums ? cluster_.all_reduce.value : 1;
  const double beyond =
      layout.nodes > 1 ? faster * net_share(layout.nodes) * double(layout.in_node) : 1e30;
  const double inside =
      layout.in_node > 1 || layout.nodes == 1 ? take("node.gbs", cluster_.node.gbs) * 1e9 : 1e30;
  link = beyond < inside ? Resource::net : Resource::node;
  return std::min(beyond, inside);
}

ExchangeSeconds Cost::of(const Exchange& exchange, const ProgramGroup& group) {
  if (exchange.kind == CommKind::send || exchange.kind == CommKind::recv) {
    return message(exchange, group);
  }
  const auto ranks_per_node = static_cast<int64_t>(cluster_.ranks_per_node.value);
  return of(exchange.kind, double(exchange.payload_bytes),
            layout_of(*group.members, ranks_per_node));
}

ExchangeSeconds Cost::of(CommKind kind, double bytes, const GroupLayout& layout) {
  const auto n = double(layout.ranks);
  const double alpha = 1e-6 * (layout.nodes > 1 ? take("net.latency", cluster_.net.latency_us)
                                                : take("node.latency", cluster_.node.latency_us));
  Resource link = Resource::node;
  const double all = bytes / ring_rate(layout, kind == CommKind::all_reduce, link);
  const double hops = n - 1;
  double latency = hops * alpha, sends = 0;
  switch (kind) {
    case CommKind::all_reduce:
      latency *= 2;
      sends = 2 * hops / n * all;
      break;
    case CommKind::reduce_scatter:
    case CommKind::all_gather:
      sends = hops / n * all;
      break;
    case CommKind::broadcast:
      sends = all;
      break;
    case CommKind::all_to_all:
      return all_to_all(bytes, layout);
    default:
      latency *= 2;  // a barrier
      break;
  }
  return {latency + sends, latency + sends, latency, link};
}
// [links]

/// Inside of nodes and beyond them, side by side.
ExchangeSeconds Cost::all_to_all(double bytes, const GroupLayout& layout) {
  const auto n = double(layout.ranks), own = double(layout.in_node);
  ExchangeSeconds inside, beyond;
  if (own > 1) {
    const double alpha = 1e-6 * take("node.latency", cluster_.node.latency_us);
    const double all = alpha + (own - 1) / n * bytes / (take("node.gbs", cluster_.node.gbs) * 1e9);
    inside = {all, all, alpha, Resource::node};
  }
  if (layout.nodes > 1) {
    const double alpha = 1e-6 * take("net.latency", cluster_.net.latency_us);
    const double all = alpha + (n - own) / n * bytes / net_share(layout.nodes);
    beyond = {all, all, alpha, Resource::net};
  }
  return beyond.busy > inside.busy ? beyond : inside;
}

ExchangeSeconds Cost::message(const Exchange& exchange, const ProgramGroup& group) {
  const auto node = [&](int rank) {
    return (*group.members)[rank] / static_cast<int64_t>(cluster_.ranks_per_node.value);
  };
  const bool near = node(group.rank) == node(exchange.peer);
  const double rate = near ? take("node.gbs", cluster_.node.gbs) * 1e9 : net_share(2);
  const double alpha = 1e-6 * (near ? take("node.latency", cluster_.node.latency_us)
                                    : take("net.latency", cluster_.net.latency_us));
  const double busy = double(exchange.payload_bytes) / rate;
  return {busy, busy + alpha, alpha, near ? Resource::node : Resource::net};
}

}  // namespace usp
