#pragma once

#include <string>

#include "planner/run_times.h"

namespace usp {

/// Reads what a program of nccl-tests, such as `all_reduce_perf -b 8 -e 1G -f 2 -g 8`, has printed:
/// a collective of all its ranks at several sizes. The lines about its devices say on which nodes
/// the ranks were. Launchers may have put their own words before a line. Throws UsageError, with
/// the line and what to do, where the text is no such output, or is of several groups at once.
RunTimes read_nccl_tests(const std::string& file);

}  // namespace usp
