#pragma once

#include <string>
#include <string_view>

#include "files/run_dir.h"
#include "run/comm_config.h"

namespace usp {

/// What the traced steps have spent waiting for messages, per step: means over ranks and steps. On
/// a device it is the time for which the device's own queue stood still, and steps last as long as
/// the device was at work on them.
struct WaitingTime {
  double step_ms = 0;
  /// Waiting after the last participant has called the operation: the network's time.
  double exposed_ms = 0;
  double skew_ms = 0;  ///< before that moment: a late rank's time
};

/// Writes trace.json: the spans and the messages of all ranks on one clock, with a lane for the
/// main thread of every rank and one for each of its communicators; and for a device one of its own
/// work, and others of what it does for messages. Rank 0 writes. Collective over
/// the world; `tokens_per_step` is the whole run's. Returns how long the ranks have waited, the
/// same on all of them. `clock_offset`: nanoseconds that this rank's clock is ahead of rank 0's;
/// measured where it is not given.
WaitingTime write_timeline(const Communicator& world, const Connection& connection,
                           const RunDir& run_dir, std::string_view chapter, int64_t tokens_per_step,
                           std::optional<int64_t> clock_offset = {});

/// Nanoseconds that this rank's clock is ahead of rank 0's, by the fastest of several messages
/// there and back; `clock` reads this rank's. Collective over the world.
int64_t measure_clock_offset(const Communicator& world, const std::function<int64_t()>& clock);

/// A row for the report: how much of a step was communication that nothing hid, if there was any.
std::pair<std::string, std::string> waiting_row(const WaitingTime& waiting, int ranks);

}  // namespace usp
