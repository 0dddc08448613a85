#pragma once

#include <array>
#include <chrono>
#include <string>

#include "comm/communicator.h"

namespace usp {

/// What a message from one rank to another costs: latency + bytes / bandwidth.
struct Link {
  double latency_us = 0;
  double gb_per_s = 0;  ///< 1e9 bytes per second; 0: the link is what it is

  /// latency_us, in the unit of the clocks.
  std::chrono::nanoseconds latency() const;
  /// bytes / bandwidth, which must not be 0.
  std::chrono::nanoseconds transmission(int64_t bytes) const;
};

/// A machine's links: one kind between ranks of a node, another between nodes.
struct Links {
  int64_t node_size = 0;  ///< ranks in a node; 0: all of them
  Link node, net;
  /// What this machine's threads take to notice that a message has come: part of the latency.
  std::chrono::nanoseconds wake_up{0};

  bool same_node(int rank, int other) const;  ///< by their numbers in the world
  const Link& between(int rank, int other) const { return same_node(rank, other) ? node : net; }
};

/// Slows the messages of a rank down to the speed of links that it does not have.
///
/// Outgoing bytes queue behind one another: those for ranks of the node as they would at an NVLink
/// port, all others as at a network card. A message arrives one latency after its last byte has
/// left. That latency includes the time in which the waiting thread wakes up.
class EmulatedLinks {
 public:
  /// The clock of every time here.
  using Clock = std::chrono::steady_clock;

  EmulatedLinks(int rank, const Links& links) : rank_(rank), links_(links) {}

  /// When a message leaves and arrives.
  struct Times {
    Clock::time_point sent;     ///< the last byte has left
    Clock::time_point arrives;  ///< and has come
  };
  /// When a message of this many bytes, handed to the link at `time`, leaves and arrives. Both are
  /// the epoch where the link is not emulated.
  Times transmit(int to, int64_t bytes, Clock::time_point time);

 private:
  int rank_;
  Links links_;
  std::array<Clock::time_point, 2> free_{};  ///< when each link is free: in the node, beyond
};

/// Parses "node=100,2", the kind of link with microseconds and GB/s, into `links`. Throws
/// UsageError.
void parse_link(const std::string& text, Links& links);

/// How much longer a message takes than its emulated link asks for. The excess is the threads' own
/// time, which Links::wake_up takes into account. Collective; takes some ten milliseconds, and
/// leaves a link emulated.
std::chrono::nanoseconds measure_wake_up(const Communicator& world);

/// What messages between neighboring ranks take here, all pairs at once: the largest latency and
/// the smallest bandwidth of any. Collective; takes some ten milliseconds.
Link measure_host_link(const Communicator& world);

}  // namespace usp
