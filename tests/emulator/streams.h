#pragma once

#include <deque>
#include <memory>

#include "internal.h"

/// The moment at which an event was recorded: known once the queue has come to it.
struct Moment {
  bool passed = false;
  double microseconds = 0;
};

struct CUevent_st {
  unsigned flags;
  std::shared_ptr<Moment> last;  // of the last record; nullptr before the first
};

struct CUstream_st {
  struct Operation {
    uint64_t number;  // counts all that was ever queued
    size_t bytes;
    std::shared_ptr<Moment> after;  // what it waits for, or nullptr
    std::function<void()> work;
    std::function<bool()> may_begin = nullptr;  // asked once `after` has passed
  };

  int device;
  unsigned flags;
  bool legacy;  // the default stream of its device, which takes turns with the blocking ones
  std::deque<Operation> queue;
};

namespace usp::emulator {

/// The stream goes on when the moment, unless it is null, has passed.
void enqueue_wait(cudaStream_t stream, std::shared_ptr<Moment> after);
/// As enqueue(), for work that begins when it may.
void enqueue_when(cudaStream_t stream, size_t bytes, std::function<bool()> may_begin,
                  std::function<void()> work);
/// Runs queued work until it is done, and lets other ranks queue more. Where nothing can come any
/// more, a problem says what was waited for; then false.
bool run_until(const std::function<bool()>& done,
               const char* waiting = "streams wait for each other, or for what no rank queues");

}  // namespace usp::emulator
