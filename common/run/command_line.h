#pragma once

#include <string>
#include <vector>

#include "base/rules.h"
#include "run/run_config.h"

namespace usp {

/// Fills the configuration from a program's name and flags, for a run of so many ranks; 0: as many
/// as the flags ask for. `args` must know no flags yet. Returns false after --help and --version.
/// Throws UsageError; what a Refusal advises has been tried on these words, and is accepted.
bool read_command_line(RunConfig& config, Args& args, const std::vector<std::string>& words,
                       int64_t ranks);

/// The same; what a Refusal advises has not been tried, which may take longer than all the rest.
bool read_without_advice(RunConfig& config, Args& args, const std::vector<std::string>& words,
                         int64_t ranks);

}  // namespace usp
