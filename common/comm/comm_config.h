#pragma once

#include "args.h"
#include "comm/communicator.h"
#include "run_dir.h"

namespace usp {

struct CommConfig {
  double comm_timeout = 300;  ///< seconds after which an operation under way counts as stuck

  void bind(Args& args);
  void validate(const Args& args) const;
};

/// From here on a stuck operation is reported, and every rank keeps its flight record in the run
/// directory. Collective over the world; rank 0 must have made the directory.
void watch(const Communicator& world, const CommConfig& config, const RunDir& run_dir);

}  // namespace usp
