#pragma once

#include <optional>

#include "base/args.h"
#include "comm/communicator.h"
#include "comm/links.h"
#include "files/run_dir.h"

namespace usp {

struct RunConfig;

/// The flags of runs with several ranks.
struct CommConfig {
  double comm_timeout = 300;      ///< seconds after which an operation under way counts as stuck
  int64_t node_size = 0;          ///< ranks in a node; 0: all of them
  std::vector<std::string> link;  ///< emulated links, such as "net=500,0.25"
  int64_t world_size = 0;         ///< ranks that an estimate or a plan is of; 0: those that run
  std::string comm = "mpi";       ///< what carries tensors of GPUs: "mpi", by the host, or "nccl"
  int64_t ranks = 0;              ///< of the run, no flag; 0: as many as the flags ask for

  void bind(Args& args);
  void validate(const Args& args) const;
  /// Throws UsageError where the flags ask for other ranks than there are, or nodes would not hold
  /// equally many of them.
  void check(const RunConfig& run) const;
};

/// What messages of a run travel by.
struct Connection {
  int64_t ranks = 1;
  int64_t node_size = 0;
  Link host;                   ///< what the machine itself does
  std::optional<Links> links;  ///< emulated, if any
};

/// From here on a stuck operation is reported, and every rank keeps its flight record in the run
/// directory. Collective over the world; rank 0 must have made the directory.
void watch(const Communicator& world, const CommConfig& config, const RunDir& run_dir);

/// From here on NCCL carries what lies on GPUs. Collective over the world. Throws UsageError on all
/// ranks where two of them share a GPU or cannot see each other's, or one cannot use NCCL.
void use_nccl(const Communicator& world);

/// From here on messages are as slow as the links that the configuration asks for, and the ledger
/// knows nodes of node_size ranks. Collective over the world. Throws UsageError where a link would
/// have to be faster than this machine. With `measure` it finds out what this machine does even if
/// no link is asked for.
Connection connect(const Communicator& world, const CommConfig& config, bool measure);

}  // namespace usp
