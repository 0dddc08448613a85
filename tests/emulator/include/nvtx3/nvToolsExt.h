#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

/// The ranges that a profiler is told of, by each thread.
namespace usp::emulator {

inline thread_local std::vector<std::string> open_ranges;
inline thread_local std::map<std::string, int64_t> ranges;  // how often one was begun, by name
inline thread_local int64_t unbalanced_ranges = 0;          // ended where none was open

}  // namespace usp::emulator

inline int nvtxRangePushA(const char* name) {
  usp::emulator::open_ranges.emplace_back(name);
  ++usp::emulator::ranges[name];
  return static_cast<int>(usp::emulator::open_ranges.size()) - 1;
}

inline int nvtxRangePop() {
  if (usp::emulator::open_ranges.empty()) {
    ++usp::emulator::unbalanced_ranges;
    return -1;
  }
  usp::emulator::open_ranges.pop_back();
  return static_cast<int>(usp::emulator::open_ranges.size());
}
