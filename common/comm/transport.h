#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

namespace usp {

/// What a communication thread sleeps on: whoever has something for it rings.
class Bell {
 public:
  void ring();  ///< wakes who waits
  /// How often it was rung; hand it to wait() to miss nothing.
  int64_t count();
  /// Sleeps until it has been rung more often than `seen`, or the time is over.
  void wait(int64_t seen, std::chrono::microseconds time);

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  int64_t count_ = 0;
};

/// A message under way.
struct Request {
  uint64_t id = 0;
  int64_t bytes = 0;  ///< a receive's: how many came, once it is done
  bool done = false;
};

/// What a rank tells every other one beside its messages.
struct Notice {
  /// What it is about.
  enum Type : int32_t {
    leaving,  ///< its program has ended
    failed,   ///< it has failed, and why
    report,   ///< it asks what every rank is doing: an operation takes too long
    status,   ///< the answer to that
  };
  Type type = leaving;
  int32_t rank = 0;  ///< the sender, in the world
  char text[1000] = {};
};

/// Moves bytes between the ranks of a run: what distinguishes one engine from another. All methods
/// are called by the rank's communication thread, and none of them blocks.
///
/// Messages between two ranks under one tag arrive in the order in which they were sent: the first
/// in the memory of the receive that was begun first, whichever is tested first.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;  ///< in the world
  virtual int size() const = 0;  ///< ranks of the world

  /// Begins to send; `data` must stay as it is until test() says that it has gone.
  virtual Request send(int rank, int64_t tag, const void* data, int64_t bytes) = 0;
  /// Throws Error, at the latest in test(), if more than `capacity` bytes come.
  virtual Request receive(int rank, int64_t tag, void* data, int64_t capacity) = 0;
  /// Whether the message has gone or come.
  virtual bool test(Request& request) = 0;

  virtual void announce(const Notice& notice) = 0;  ///< to every other rank
  virtual std::optional<Notice> next_notice() = 0;  ///< that has come, the oldest first

  /// The bell that this rank's communication thread sleeps on.
  virtual Bell& bell() = 0;
  /// Whether the bell rings for every message and notice that arrives, and for every message that
  /// has gone. A waiting thread may then sleep until it rings; elsewhere it has to poll.
  virtual bool rings() const = 0;
  /// How long a waiting thread polls and yields before it sleeps.
  virtual std::chrono::microseconds patience() const = 0;
  /// Whether each rank is a process, with which everything ends that its device does.
  virtual bool ranks_are_processes() const = 0;
  /// Gives up every message under way. Returns whether their memory may be used again.
  virtual bool cancel() = 0;
  /// Ends every process of the run, at once, with this exit code.
  [[noreturn]] virtual void abort(int code) = 0;
};

}  // namespace usp
