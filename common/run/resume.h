#pragma once

#include "base/args.h"
#include "run/run_config.h"

namespace usp {

/// Gives a run that resumes another one what its newest checkpoint says of that one: every flag
/// that the command line leaves open, such as the model's shape, the data and the number of steps.
/// How the work is divided is taken, too, where there are as many ranks and the command line has no
/// flag of that. Where there is no checkpoint that can be read, nothing is taken: who loads it says
/// what is wrong.
void take_from_checkpoint(RunConfig& config, Args& args, int64_t ranks);

/// Makes the global batch as large as in the checkpoint, where flags that are open allow it.
void keep_batch_of_checkpoint(RunConfig& config, const Args& args);

}  // namespace usp
