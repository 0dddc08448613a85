#pragma once

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "testing.h"

/// Whether a trace file is one that Perfetto shows whole; tests/trace_format.py says what the rule
/// is, and holds the traces of programs to it.
namespace usp::test {

inline int64_t nanoseconds(const nlohmann::json& microseconds) {
  return std::llround(1000 * microseconds.get<double>());
}

/// What `events` breaks of the rule; empty for nothing. one_clock: whether ranks share a clock; the
/// devices of emulated ranks do not, so a message may seem to end before it began.
inline std::string broken_rule(const nlohmann::json& events, bool one_clock = true) {
  struct Slice {
    int64_t begin, end;
    std::string name;
  };
  struct End {
    std::pair<int, int> thread;
    int64_t at;
  };
  std::map<std::pair<int, int>, std::vector<Slice>> threads;
  std::map<int64_t, std::map<std::string, std::vector<End>>> flows;
  for (const nlohmann::json& event : events) {
    const std::string kind = event["ph"];
    if (kind == "X") {
      const int64_t begin = nanoseconds(event["ts"]);
      threads[{event["pid"], event["tid"]}].push_back(
          {begin, begin + nanoseconds(event["dur"]), event["name"]});
    } else if (kind == "s" || kind == "f") {
      flows[event["id"]][kind].push_back({{event["pid"], event["tid"]}, nanoseconds(event["ts"])});
    }
  }
  for (auto& [thread, slices] : threads) {
    std::ranges::sort(slices, {}, [](const Slice& s) { return std::pair(s.begin, -s.end); });
    std::vector<Slice> around;
    for (const Slice& slice : slices) {
      while (!around.empty() && around.back().end <= slice.begin) around.pop_back();
      if (!around.empty() && slice.end > around.back().end) {
        return fmt::format("in thread {} of rank {}, {} overlaps {}", thread.second, thread.first,
                           slice.name, around.back().name);
      }
      around.push_back(slice);
    }
  }
  const auto lies_in_a_slice = [&](const End& end) {
    return std::ranges::any_of(threads[end.thread], [&](const Slice& s) {
      return s.begin <= end.at && (end.at < s.end || s.begin == s.end);
    });
  };
  for (auto& [id, ends] : flows) {
    if (ends["s"].size() != 1 || ends["f"].size() != 1 ||
        (one_clock && ends["s"][0].at > ends["f"][0].at)) {
      return fmt::format("flow {} has no beginning with an end after it", id);
    }
    if (!lies_in_a_slice(ends["s"][0]) || !lies_in_a_slice(ends["f"][0])) {
      return fmt::format("an end of flow {} lies in no slice", id);
    }
  }
  return {};
}

/// The trace in a file, which has to keep the rule.
inline nlohmann::json read_trace(const std::string& path, bool one_clock = true) {
  nlohmann::json trace = nlohmann::json::parse(read_file(path));
  REQUIRE(broken_rule(trace.at("traceEvents"), one_clock) == "");
  return trace;
}

}  // namespace usp::test
