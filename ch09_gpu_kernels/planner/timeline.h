#pragma once

#include <string>
#include <vector>

#include "planner/replay.h"

namespace usp {

/// The last of the steps that replay() lays out, as Chrome trace events that Perfetto opens, in the
/// form of a run's trace.json: a process for the representative of each class, with its device in
/// the first lane and the exchanges of each communicator in one of the others. Of a message the
/// sender has the slice.
std::string timeline(const std::vector<Program>& programs, const RankClasses& classes, Cost& cost);

}  // namespace usp
