#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "planner/cluster.h"
#include "planner/record.h"

namespace usp {

/// How a group of ranks lies on nodes.
struct GroupLayout {
  int64_t ranks = 1;
  int64_t nodes = 1;
  int64_t in_node = 1;  ///< of its ranks in the node that has fewest

  auto operator<=>(const GroupLayout&) const = default;
};

/// Layout of these ranks of the world, on nodes of `ranks_per_node`.
GroupLayout layout_of(const std::vector<int>& members, int64_t ranks_per_node);
/// Layout of `ranks` ranks from rank 0 on, each at this distance from the one before it.
GroupLayout layout_of(int64_t ranks, int64_t distance, int64_t ranks_per_node);

/// What an event's seconds depend on: the peak of products, the memory's bandwidth, links inside a
/// node and between two, the latency of either, what a launch costs.
enum class Resource : uint8_t { peak, bandwidth, node, net, latency, launch };
constexpr int kResources = 6;
/// As flags and answers have them, such as "peak".
std::string_view name(Resource resource);
/// Seconds on each of them.
using ResourceSeconds = std::array<double, kResources>;

/// Seconds of an exchange: `busy` while the next of its queue waits, and until it has arrived. So
/// much of that is latency, and the rest its link's.
struct ExchangeSeconds {
  double busy = 0, arrives = 0;
  double latency = 0;
  Resource link = Resource::node;
};

// [cost]
/// What the events of a program take on a cluster, in seconds. Nothing else here knows any.
class Cost {
 public:
  explicit Cost(const Cluster& cluster) : cluster_(cluster) {}

  /// An op: as long as its products or its memory want, whichever is longer.
  double of(const Kernel& kernel);
  Resource limit(const Kernel& kernel);  ///< which of the two that is
  /// A ring of the group's ranks; a message goes to the peer alone.
  ExchangeSeconds of(const Exchange& exchange, const ProgramGroup& group);
  /// A collective of a group that lies on nodes like this.
  ExchangeSeconds of(CommKind kind, double bytes, const GroupLayout& layout);
  double launch();  ///< what the host spends on an op, or on an exchange
  // [cost]

  const Cluster& cluster() const { return cluster_; }
  /// Counts of the numbers that it was asked for so far, by where they come from.
  std::map<Origin, int> origins() const;

 private:
  /// A number of the cluster; `of`: which one, where `key` has several.
  double take(const char* key, const Sourced& number, std::string_view of = {});
  double efficiency(const Kernel& kernel);
  /// Bytes a second at which each rank of a ring can send; `sums`: of an all-reduce.
  double ring_rate(const GroupLayout& layout, bool sums, Resource& link);
  double net_share(int64_t nodes);
  double moved(const Kernel& kernel);
  double multiplied(const Kernel& kernel);
  ExchangeSeconds message(const Exchange& exchange, const ProgramGroup& group);
  ExchangeSeconds all_to_all(double bytes, const GroupLayout& layout);

  static constexpr size_t kMost = 32;  ///< numbers that it may ask for

  const Cluster& cluster_;
  std::array<const Sourced*, kMost> taken_;  ///< of the cluster, in the order in which they were
  size_t count_ = 0;                         ///< of these
};

}  // namespace usp
