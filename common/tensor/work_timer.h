#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "tensor/marks.h"

namespace usp {

/// Tells what pieces of this rank's work take, for whoever does it. By the host's clock where the
/// work is over when a call returns. By marks in an accelerator's queue, which the host only fills:
/// these are read later, so that no work waits for being measured.
class WorkTimer {
 public:
  /// Timer of work on the current runtime's device, which must outlive it.
  WorkTimer();

  /// A point behind all work that was given so far.
  int64_t now() const { return marks_ == nullptr ? clock_ns() : marks_->make(); }
  /// Hands the seconds from `begin`, a point, to this one to `use`: at once, or an accelerator's
  /// when they are read.
  template <class Use>
  void since(int64_t begin, Use use) {
    if (marks_ == nullptr) return use(seconds_since(begin));
    unread_.push_back({begin, marks_->make(), std::move(use)});
  }
  /// Reads what was not read yet. Waits for all that an accelerator was given: for between two
  /// steps. No piece may begin at a point from before.
  void read();
  /// What was not read yet never is.
  void forget() { unread_.clear(); }

 private:
  struct Piece {
    int64_t begin, end;  ///< marks
    std::function<void(double)> use;
  };

  std::unique_ptr<Marks> marks_;  ///< nullptr where the host's clock tells
  std::vector<Piece> unread_;
};

}  // namespace usp
