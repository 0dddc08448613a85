#pragma once

#include <string>
#include <vector>

/// The ranges that a profiler is told of.
namespace usp::emulator {

inline thread_local std::vector<std::string> open_ranges;

}  // namespace usp::emulator

inline int nvtxRangePushA(const char* name) {
  usp::emulator::open_ranges.emplace_back(name);
  return static_cast<int>(usp::emulator::open_ranges.size()) - 1;
}

inline int nvtxRangePop() {
  usp::emulator::open_ranges.pop_back();
  return static_cast<int>(usp::emulator::open_ranges.size());
}
