#pragma once

#include <string>

#include "run/metrics.h"

namespace usp {

/// In words, such as "9 s", "3 min 05 s" or "2 h 07 min".
std::string duration(double seconds);

/// Shows a run as it goes: one line rewritten in place on a terminal; elsewhere a line now and
/// then.
class Progress {
 public:
  /// A run of this many steps, of which the first `done` were finished before.
  explicit Progress(int64_t steps, int64_t done = 0);
  Progress(int64_t steps, int64_t done, bool terminal);  ///< whether its line is rewritten in place
  ~Progress();

  void show(const StepMetrics& metrics);  ///< a step that has just ended
  /// The line of a step, `elapsed` seconds after the run began. A validation loss of an earlier
  /// step is named with that step; where lines stay, it is in one of them.
  std::string line(const StepMetrics& metrics, double elapsed);
  /// Prints a line of its own, above the live one.
  void say(const std::string& line);

 private:
  void clear_line();

  int64_t steps_, done_;
  bool terminal_;
  bool line_open_ = false;
  double val_loss_ = 0;
  int64_t val_step_ = 0;  ///< at which it was computed; 0: none that is still to be shown
  int64_t begin_ns_;
  int64_t shown_ns_;
};

}  // namespace usp
