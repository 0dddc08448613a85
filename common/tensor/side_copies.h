#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace usp {

/// Copies between an accelerator's memory and pinned memory of the host, in two queues beside its
/// own, one for each direction: for what ranks send each other while the device computes. An
/// accelerator that can do this implements it, too.
class SideCopies {
 public:
  /// Bytes that lie side by side, on either end.
  struct Copy {
    void* to;
    const void* from;
    int64_t bytes;
  };

  /// A point in a queue. Any thread of the rank may ask for it.
  class Event {
   public:
    /// What it is behind: this many bytes, between two of the device's marks; -1 while there are
    /// none.
    int64_t bytes = 0, begin_mark = -1, end_mark = -1;

    virtual ~Event() = default;
    /// Whether the device has come there.
    virtual bool passed() = 0;
    /// Returns when it has; the thread sleeps meanwhile.
    virtual void wait() = 0;
  };

  virtual ~SideCopies() = default;
  /// Tells the device from all others of the machine: ranks with the same share it.
  virtual std::string address() const = 0;
  /// Queues copies to the host, which begin when the device has done all that it was given so far.
  /// The event is behind them, and behind all that, where there is nothing to copy as well. For the
  /// rank's main thread.
  virtual std::shared_ptr<Event> download(std::span<const Copy> copies) = 0;
  /// Queues copies to the device, which begin at once. For any thread of the rank.
  virtual std::shared_ptr<Event> upload(std::span<const Copy> copies) = 0;
  /// What the device is given from here on begins behind the event; the host goes on. For the
  /// rank's main thread.
  virtual void hold_work_until(Event& event) = 0;
};

}  // namespace usp
