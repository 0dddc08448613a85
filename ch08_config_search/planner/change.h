#pragma once

#include <array>
#include <string>
#include <vector>

#include "planner/cluster.h"

namespace usp {

/// The numbers of a cluster that a change may be about: its cards' peak, their memory's bandwidth
/// and capacity, its links inside a node and between two, their latency, the cost of a launch.
constexpr std::array<const char*, 7> kChangeable = {"peak",    "bandwidth", "node",    "net",
                                                    "latency", "launch",    "capacity"};

/// A change of a cluster, such as "net=+100%", "gpu=h200" or "ranks=-8".
struct Change {
  std::string key;
  double factor = 1;  ///< of one of the numbers
  std::string gpu;    ///< the cluster whose cards are there instead
  int64_t ranks = 0;  ///< more than there are
};

/// Changes that commas separate. Throws UsageError with the part that is none.
std::vector<Change> parse_changes(const std::string& text);
/// The cluster with one of its numbers, called `key`, `factor` times as large.
Cluster changed(Cluster cluster, const std::string& key, double factor);
/// The cluster with the cards of another one: what they compute, hold and move, and the links among
/// those of a node. Its nodes and their NICs stay.
Cluster with_cards(Cluster cluster, const Cluster& of);

}  // namespace usp
