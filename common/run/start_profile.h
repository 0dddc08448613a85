#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace usp {

/// What a run does until its first step has ended, for start.json: each part's seconds, and on how
/// many cores it was at work. A part that keeps one core busy for long is where a start is slow.
class StartProfile {
 public:
  StartProfile();

  /// What this process has done since the last call, or since the object was made, was `what`.
  void ended(std::string what);
  /// {"seconds": 3.2, "parts": [{"what": "weights", "seconds": 2.1, "cores": 1.9}, ...]}
  std::string to_json() const;

 private:
  struct Part {
    std::string what;
    double seconds, cpu_seconds;
  };
  int64_t since_ns_, cpu_since_ns_;
  std::vector<Part> parts_;
};

}  // namespace usp
