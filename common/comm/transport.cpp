#include "comm/transport.h"

namespace usp {

void Bell::ring() {
  {
    const std::lock_guard lock(mutex_);
    ++count_;
  }
  condition_.notify_one();
}

int64_t Bell::count() {
  const std::lock_guard lock(mutex_);
  return count_;
}

void Bell::wait(int64_t seen, std::chrono::microseconds time) {
  std::unique_lock lock(mutex_);
  condition_.wait_for(lock, time, [&] { return count_ > seen; });
}

}  // namespace usp
