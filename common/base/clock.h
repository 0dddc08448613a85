#pragma once

#include <cstdint>
#include <functional>

namespace usp {

/// Nanoseconds of the steady clock, which all processes of a machine read alike, or what a SetClock
/// of this thread returns. All that reports, metrics and traces say of time is measured with it.
int64_t clock_ns();
/// Seconds from then, a time of clock_ns(), until now.
double seconds_since(int64_t begin_ns);

/// While it lives, clock_ns() on this thread returns what `read` does: for tests, in which time
/// passes as they say.
class SetClock {
 public:
  explicit SetClock(std::function<int64_t()> read);
  ~SetClock();
  SetClock(const SetClock&) = delete;
  SetClock& operator=(const SetClock&) = delete;

 private:
  std::function<int64_t()> read_;
  const std::function<int64_t()>* before_;
};

}  // namespace usp
