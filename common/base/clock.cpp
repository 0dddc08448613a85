#include "base/clock.h"

#include <chrono>

namespace usp {

namespace {

thread_local const std::function<int64_t()>* set_clock = nullptr;

}  // namespace

int64_t clock_ns() {
  if (set_clock != nullptr) return (*set_clock)();
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double seconds_since(int64_t begin_ns) { return 1e-9 * double(clock_ns() - begin_ns); }

SetClock::SetClock(std::function<int64_t()> read) : read_(std::move(read)), before_(set_clock) {
  set_clock = &read_;
}

SetClock::~SetClock() { set_clock = before_; }

}  // namespace usp
