#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/rules.h"
#include "run/run_config.h"

namespace usp {

/// What else has to hold of a command line once it has been read; throws UsageError if it does not.
using AlsoHolds = std::function<void(const RunConfig&, const Args&)>;

/// Fills the configuration from a program's name and flags, for a run of so many ranks; 0: as many
/// as the flags ask for. `args` must know no flags yet. Returns false after --help and --version.
/// Throws UsageError; what a Refusal advises has been tried on these words, and is accepted, by
/// `also` as well if anything is.
bool read_command_line(RunConfig& config, Args& args, const std::vector<std::string>& words,
                       int64_t ranks, const AlsoHolds& also = {});

/// The refusal with those of its remedies that were tried on these words and are accepted, by the
/// configuration and by `also`; none where none is. `kind`: a configuration of the program.
Refusal with_accepted(const RunConfig& kind, const std::vector<std::string>& words, int64_t ranks,
                      const Refusal& refusal, const AlsoHolds& also = {});

/// Like read_command_line(); what a Refusal advises has not been tried, which may take longer than
/// all the rest.
bool read_without_advice(RunConfig& config, Args& args, const std::vector<std::string>& words,
                         int64_t ranks);

}  // namespace usp
