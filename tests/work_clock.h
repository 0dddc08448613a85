#pragma once

#include <set>
#include <string>

#include "base/clock.h"
#include "tensor/recorder.h"

namespace usp::test {

/// The clock of this thread's rank while it lives. An op takes a microsecond, a wait for a message
/// seven, and nothing else takes any time.
class WorkClock : public Recorder {
 public:
  static constexpr int64_t kOpNs = 1000, kWaitNs = 7000;

  /// `work`: the phases in which the rank works, whatever it waits for there.
  explicit WorkClock(std::set<std::string> work = {}) : work_(std::move(work)) {
    Runtime::current().tell(this);
  }
  ~WorkClock() override { Runtime::current().tell(nullptr); }
  WorkClock(const WorkClock&) = delete;
  WorkClock& operator=(const WorkClock&) = delete;

  int64_t now() const { return now_; }
  int64_t worked() const { return worked_; }
  /// From the moment at which the first batch was taken to the end of the last work.
  int64_t span() const { return end_ - begin_; }
  double idle() const { return 1 - double(worked_) / double(span()); }

  void op(std::string_view, int64_t, int64_t, std::span<const Tensor* const>, bool) override {
    now_ += kOpNs;
  }
  int64_t post(const Posted&) override { return 0; }
  /// The time passes between the next two readings, which are those around the wait.
  void wait(int64_t) override { waits_ = true; }
  void begin_phase(std::string_view name, int64_t, int64_t) override {
    if (name == "take_batch" && begin_ < 0) begin_ = now_;
    const bool works = depth_ > 0 || work_.contains(std::string(name));
    if (works && depth_++ == 0) work_began_ = now_;
  }
  void end_phase() override {
    if (depth_ == 0 || --depth_ > 0) return;
    worked_ += now_ - work_began_;
    end_ = now_;
  }

 private:
  int64_t read() {
    const int64_t time = now_;
    if (waits_) now_ += kWaitNs;
    waits_ = false;
    return time;
  }

  std::set<std::string> work_;
  int64_t now_ = 0, begin_ = -1, end_ = 0, work_began_ = 0, worked_ = 0;
  int64_t depth_ = 0;  ///< of phases inside of work
  bool waits_ = false;
  SetClock set_{[this] { return read(); }};
};

}  // namespace usp::test
