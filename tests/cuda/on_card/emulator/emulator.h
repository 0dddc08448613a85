#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

/// In the place of the emulator's header where a GPU runs the same tests: what they set has no
/// effect, and what they ask has no answer. Cases about the emulator itself have the tag
/// [emulated].
namespace usp::emulator {

enum class Order { forward, reverse, shuffled };

struct Options {
  Order threads = Order::forward, streams = Order::forward;
  bool checks = false, protect = false, host_clock = false, every_order = false;
  int compute_capability = 0, shared_bytes = 0;
};
inline Options options;

class Use {
 public:
  explicit Use(const Options& /*now*/) {}
};

struct Report {
  std::vector<std::string> problems;
  std::string text() const { return ""; }
};
inline Report take_report() { return {}; }

struct TimedEvents {
  int64_t created = 0, recorded = 0;

  bool operator==(const TimedEvents&) const = default;
};
inline TimedEvents timed_events() { return {}; }

inline std::map<std::string, int64_t> ranges;
inline std::vector<std::string> open_ranges;
inline int64_t unbalanced_ranges = 0;

}  // namespace usp::emulator
