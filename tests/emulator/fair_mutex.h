#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace usp::emulator {

/// A recursive mutex that threads get in the order in which they ask. With one that goes to whoever
/// is quick, a thread that asks again and again whether the device is ready keeps the others from
/// queueing what the device waits for.
class FairMutex {
 public:
  void lock() {
    std::unique_lock held(mutex_);
    if (owner_ != std::this_thread::get_id()) {
      const uint64_t ticket = asked_++;
      changed_.wait(held, [&] { return served_ == ticket; });
      owner_ = std::this_thread::get_id();
    }
    ++depth_;
  }
  void unlock() {
    {
      const std::lock_guard held(mutex_);
      if (--depth_ > 0) return;
      owner_ = {};
      ++served_;
    }
    changed_.notify_all();
  }
  /// How many threads hold it or wait for it.
  int asking() {
    const std::lock_guard held(mutex_);
    return static_cast<int>(asked_ - served_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t asked_ = 0, served_ = 0;
  std::thread::id owner_;
  int depth_ = 0;
};

}  // namespace usp::emulator
