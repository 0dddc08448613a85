#pragma once

#include <deque>
#include <memory>

#include "internal.h"

namespace usp::emulator {

/// How many operations of each stream, by its place, are known to be over.
using StreamClock = std::vector<uint32_t>;

}  // namespace usp::emulator

/// The moment at which an event was recorded: known once the queue has come to it.
struct Moment {
  bool passed = false;
  double microseconds = 0;
  usp::emulator::StreamClock known{};  // to the stream that recorded it
};

struct CUevent_st {
  unsigned flags;
  int device;
  std::shared_ptr<Moment> last;  // of the last record; nullptr before the first
};

struct CUstream_st {
  struct Operation {
    uint64_t number;  // counts all that was ever queued
    size_t bytes;
    std::shared_ptr<Moment> after;  // what it waits for, or nullptr
    std::function<void()> work;
    std::function<bool()> may_begin = nullptr;  // asked once `after` has passed
    std::shared_ptr<const usp::emulator::StreamClock> host = nullptr;  // what the host knew
  };

  int device;
  unsigned flags;
  bool legacy;  // the default stream of its device, which takes turns with the blocking ones
  std::deque<Operation> queue{};
  size_t place = 0;                    // in clocks; that of a stream that is gone is free
  usp::emulator::StreamClock known{};  // to what runs now, itself included
  std::shared_ptr<const usp::emulator::StreamClock> host{};  // what the host told last
};

namespace usp::emulator {

/// The stream goes on when the moment, unless it is null, has passed.
void enqueue_wait(cudaStream_t stream, std::shared_ptr<Moment> after);
/// As enqueue(), for work that begins when it may.
void enqueue_when(cudaStream_t stream, size_t bytes, std::function<bool()> may_begin,
                  std::function<void()> work);
/// Runs queued work until it is done, and lets other ranks queue more. Where nothing can come any
/// more, a problem says what was `waiting`; then false.
bool run_until(const std::function<bool()>& done, const std::function<std::string()>& waiting);
/// Streams.
bool run_until(const std::function<bool()>& done);
/// What is over when the running operation begins, and the operation itself.
const StreamClock& known_here();
/// The host has waited for it.
void tell_host(const StreamClock& known);
/// Is the stream of the device that this thread has set? Else there is a problem: a GPU refuses
/// `what`, or puts it on the wrong device.
bool of_this_device(cudaStream_t stream, const char* what);

}  // namespace usp::emulator
