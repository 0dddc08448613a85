#pragma once

#include <array>
#include <map>
#include <string>

#include "tensor/dtype.h"

namespace usp {

/// Where a number of a cluster comes from.
enum class Origin : uint8_t { data_sheet, measured, published, assumed };
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

// [cluster]
/// A cluster that one need not have: what its file says, in the file's units.
struct Cluster {
  std::string name;
  bool host_computes = false;  ///< ops run where the program runs: nothing is launched
  Sourced ranks_per_node;
  Sourced nics_per_node;
  Sourced memory_gib;                    ///< that a rank can have
  std::map<DType, Sourced> peak_tflops;  ///< of products, by what they multiply
  Sourced memory_gbs;                    ///< of a rank's memory
  Sourced matmul, attention, memory;     ///< efficiencies: of large products, attention, the rest
  Sourced half_width, half_depth;        ///< m, n and k at which a product reaches half of that
  Sourced launch_us;                     ///< of an op, on the host
  ClusterLink node, net;                 ///< inside a node, between two
};
// [cluster]

/// The cluster of this name, of those that the chapter ships, or in this file. Throws UsageError,
/// with the file, the key and a value that works.
Cluster read_cluster(const std::string& name_or_file);
/// The same of a file's text.
Cluster parse_cluster(const std::string& text, const std::string& file);

}  // namespace usp
