#pragma once

#include <chrono>
#include <vector>

#include "comm/operation.h"
#include "comm/transport.h"

namespace usp {

class EmulatedLinks;

/// One message of an operation under way, with its header: which operation of which rank it belongs
/// to. A small message travels in one piece with its header, a large one right behind it.
class Transfer {
 public:
  /// The clock of every time here.
  using Clock = std::chrono::steady_clock;

  /// Posts a message of `stage`, whose header reuses the memory of `buffer`. Adds the bytes that it
  /// sends to the operation's. The message travels by `links` from `time` on; where that is
  /// nullptr, as fast as it can.
  Transfer(Transport& transport, EmulatedLinks* links, Clock::time_point time, Operation& operation,
           int stage, const Message& message, bool sending, std::vector<char> buffer);

  /// Whether it is over. Throws Error if what came belongs to another operation.
  bool advance(Transport& transport, const Operation& operation);

  bool done() const { return done_; }
  /// Whether all bytes are there and only their time has not come, on the emulated link.
  bool delayed() const { return delayed_; }
  Clock::time_point due() const { return due_; }
  int peer() const { return message_.peer; }
  /// The memory of its header, for the next one.
  std::vector<char> take_buffer() { return std::move(buffer_); }

  /// Whether operations of this kind queue separately for each peer.
  static bool is_point_to_point(CommKind kind) {
    return kind == CommKind::send || kind == CommKind::recv;
  }

 private:
  void check_header(const Operation& operation);

  Message message_;
  bool sending_;
  int stage_;
  std::vector<char> buffer_;
  Request header_;
  std::vector<Request> pieces_;
  bool header_done_ = false, delayed_ = false, done_ = false;
  Clock::time_point due_;  ///< earliest end; the epoch where no link is emulated
};

}  // namespace usp
