#pragma once

#include <memory>
#include <string>
#include <vector>

#include "files/data.h"
#include "run/run_config.h"

namespace usp {

/// What a run trains on: a file of tokens, and the samples of it. Neither moves.
struct RunData {
  /// Throws UsageError where the file is none for this configuration. `token_dtype_given`: by the
  /// command line, as are the tokens' widths then.
  RunData(const RunConfig& config, bool token_dtype_given);

  TokenFile file;
  Dataset dataset;
};

/// The data of a configuration that was read from these words, for so many ranks. What a Refusal
/// advises was tried on the words and these data.
std::unique_ptr<RunData> open_data(const RunConfig& config, const Args& args,
                                   const std::vector<std::string>& words, int64_t ranks);

/// Throws UsageError where a run of this configuration has no use for its data. Those of a long
/// file are not read: they are many enough for any sample.
void check_data(const RunConfig& config, const Args& args);

}  // namespace usp
