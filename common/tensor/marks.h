#pragma once

#include <cstdint>

namespace usp {

/// Points in a device's queues that tell when the device came to them: what the trace of a device
/// is made of. To make one, the host waits for nothing; the times are read between two steps.
class Marks {
 public:
  /// What is known of the device's clock beside the host's.
  struct Clocks {
    int64_t comparisons = 0;
    int64_t drift_ns = 0;        ///< from one comparison to the next, at most, either way
    int64_t uncertainty_ns = 0;  ///< of a comparison, at most
  };

  virtual ~Marks() = default;
  /// There are marks from here on. Waits for the device, and compares the clocks.
  virtual void begin() = 0;
  /// Queues a mark behind all that the device was given so far. Its number, which no other mark of
  /// the device has; -1 while there are none.
  virtual int64_t make() = 0;
  /// Reads the marks that the device has passed, and compares the clocks. Waits for all that it was
  /// given: for between two steps.
  virtual void read() = 0;
  /// The times of marks that were read are not asked for again.
  virtual void forget() = 0;
  /// Reads for the last time; there are no marks from here on.
  virtual void end() = 0;
  /// When the device came to a mark that was read, in nanoseconds of clock_ns(). -1 for any other.
  virtual int64_t time_of(int64_t mark) const = 0;
  /// Outcome of the comparisons since begin().
  virtual Clocks clocks() const = 0;
};

}  // namespace usp
