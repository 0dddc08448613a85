#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

#include "tensor/runtime.h"

namespace usp {

// [turns]
/// Two strands of a rank's program that take turns: where one of them would wait for the other
/// ranks, the other one computes. Only one runs at a time, and the turns change at fixed places, so
/// that neither order nor result depends on timing. Wang et al., Domino (2024),
/// https://arxiv.org/abs/2409.15241.
class Turns {
 public:
  /// Runs both to their ends: the first on this thread, the other on one of its own. Throws what
  /// either of them throws.
  void run(const std::function<void()>& first, const std::function<void()>& second);
  /// Lets the other strand go on until it does the same, or ends. Outside of run(): does nothing.
  void yield();
  // [turns]

 private:
  void begin(int strand);
  void end(int strand);
  void wait_for_turn(std::unique_lock<std::mutex>& lock, int strand);

  std::mutex mutex_;
  std::condition_variable changed_;
  int turn_ = 0;  ///< the strand that runs
  bool ended_[2] = {true, true};
  int64_t cpu_ns_ = 0;  ///< what both have spent when the turn changed
};

}  // namespace usp
