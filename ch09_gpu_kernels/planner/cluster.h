#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>

#include "tensor/dtype.h"

namespace usp {

constexpr double kBytesOfGiB = 1 << 30;  ///< as a cluster's memory_gib has it

/// Where a number of a cluster comes from.
enum class Origin : uint8_t {
  data_sheet,
  measured,
  published,
  fitted,
  assumed,
  unknown  ///< what needs the number is refused
};
/// As files have it, such as "data sheet".
std::string_view name(Origin origin);

/// A number of a cluster, and where it comes from.
struct Sourced {
  double value = 0;
  Origin origin = Origin::assumed;
  std::string from;  ///< a document, a command, or why it is assumed
};

/// A kind of link.
struct ClusterLink {
  Sourced latency_us;  ///< alpha: of each message
  Sourced
      gbs;  ///< beta: 1e9 bytes a second in one direction; inside a node of a rank, beyond of a NIC
};

// [framework]
/// What another framework makes of the cluster, fitted on its runs: for tables of measured steps.
struct Framework {
  std::string name;
  std::string attention, recompute;    ///< as the flags have them, where a row does not say
  bool sequence_parallel = false;      ///< likewise
  Sourced matmul, attention_share;     ///< efficiencies, in the place of the cluster's
  Sourced half;                        ///< m, n and k at which a product reaches half of that
  Sourced launch_us;                   ///< in the place of the cluster's
  Sourced net_latency_us, net_gbs;     ///< likewise
  Sourced per_doubling;                ///< share of net_gbs left with twice as many nodes
  Sourced all_reduce;                  ///< times net_gbs: what an all-reduce reaches between nodes
  Sourced exposed;                     ///< share of tp's exchanges that computing does not cover
  Sourced overlap;                     ///< share of a backward pass under which gradients are sent
  Sourced step_ms;                     ///< of each step, whatever its layout
  Sourced logit_bytes;                 ///< that the loss moves for each logit
  Sourced gradient_bytes, kept_bytes;  ///< of a parameter; of a token, layer and channel
  Sourced constant_gib;                ///< on every rank
};
// [framework]

// [cluster]
/// A cluster that one need not have: what its file says, in the file's units.
struct Cluster {
  std::string name;
  bool host_computes = false;  ///< ops run where the program runs, which cannot run ahead
  Sourced ranks_per_node;
  Sourced nics_per_node;
  Sourced memory_gib;                      ///< that a rank can have
  std::map<DType, Sourced> peak_tflops;    ///< of products, by what they multiply
  Sourced memory_gbs;                      ///< of a rank's memory
  Sourced matmul, attention, memory;       ///< efficiencies: of large products, attention, the rest
  Sourced half_width, half_depth;          ///< m, n and k at which a product reaches half of that
  Sourced beside{1, Origin::assumed, ""};  ///< share of its speed that an op has beside an exchange
  Sourced launch_us;                       ///< of an op, on the host
  ClusterLink node, net;                   ///< inside a node, between two
  Sourced per_doubling{1, Origin::assumed, ""};  ///< of net.gbs, with twice as many nodes
  Sourced all_reduce{1, Origin::assumed, ""};    ///< times net.gbs, of one between nodes
  std::optional<Sourced> price;  ///< of a rank and an hour, in whatever money; none is shipped
  std::optional<Framework> framework;  ///< whose runs on it have been measured
};
// [cluster]

/// The cluster of this name, of those that the chapter ships, or in this file; `flag` is what named
/// it. Throws UsageError, with the flag, the file or the key, and a value that works.
Cluster read_cluster(const std::string& name_or_file, const std::string& flag = "cluster");
/// The cluster as its framework makes use of it; itself where there is none.
Cluster as_used(Cluster cluster);
/// Where its file is.
std::string cluster_file(const std::string& name_or_file);
/// The same of a file's text.
Cluster parse_cluster(const std::string& text, const std::string& file);

}  // namespace usp
