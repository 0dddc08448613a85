#include "cuda/event_marks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "base/clock.h"
#include "cuda/errors.h"

namespace usp::cuda {

namespace {

constexpr int kTries = 4;  ///< of comparing the clocks; each costs a launch's latency

/// From one event that has passed to another; negative where that was the earlier one. A float of
/// milliseconds resolves a microsecond only within some seconds.
int64_t ns_between(cudaEvent_t from, cudaEvent_t to) {
  float ms = 0;
  USP_CUDA(cudaEventElapsedTime(&ms, from, to));
  return std::llround(1e6 * double(ms));
}

}  // namespace

EventMarks::~EventMarks() {
  for (const Pending& pending : pending_) spare_.push_back(pending.event);
  if (anchor_ != nullptr) spare_.push_back(anchor_);
  for (cudaEvent_t event : spare_) static_cast<void>(cudaEventDestroy(event));
}

void EventMarks::begin() {
  const std::lock_guard lock(mutex_);
  compare_clocks();
  on_ = true;
}

int64_t EventMarks::make(cudaStream_t stream) {
  if (!on_) return -1;
  const std::lock_guard lock(mutex_);
  const Pending made{first_ + static_cast<int64_t>(times_.size()), take()};
  USP_CUDA(cudaEventRecord(made.event, stream));
  pending_.push_back(made);
  times_.push_back(-1);
  return made.number;
}

void EventMarks::read() {
  const std::lock_guard lock(mutex_);
  USP_CUDA(cudaStreamSynchronize(stream_));
  read_passed();
  compare_clocks();
}

void EventMarks::forget() {
  const std::lock_guard lock(mutex_);
  const int64_t next = first_ + static_cast<int64_t>(times_.size());
  const int64_t kept = pending_.empty() ? next : pending_.front().number;
  times_.erase(times_.begin(), times_.begin() + (kept - first_));
  first_ = kept;
}

void EventMarks::end() {
  on_ = false;
  read();
  const std::lock_guard lock(mutex_);
  spare_.push_back(anchor_);  // too long ago by the time that marks are made again
  anchor_ = nullptr;
}

int64_t EventMarks::time_of(int64_t mark) const {
  const std::lock_guard lock(mutex_);
  return mark < first_ ? -1 : times_.at(mark - first_);
}

/// An event that waits for nothing.
cudaEvent_t EventMarks::take() {
  cudaEvent_t event = nullptr;
  if (spare_.empty()) {
    USP_CUDA(cudaEventCreateWithFlags(&event, cudaEventDefault));
    return event;
  }
  event = spare_.back();
  spare_.pop_back();
  return event;
}

/// A message that nobody has waited for yet may still be under way: its marks are left for the next
/// time.
void EventMarks::read_passed() {
  std::erase_if(pending_, [&](const Pending& pending) {
    const cudaError_t status = cudaEventQuery(pending.event);
    if (status == cudaErrorNotReady) return false;
    USP_CUDA(status);
    const int64_t time = anchor_ns_ + ns_between(anchor_, pending.event);
    times_[pending.number - first_] = time;
    last_ns_ = std::max(last_ns_, time);
    spare_.push_back(pending.event);
    return true;
  });
}

/// Between two readings of the host's clock the device, which has nothing else to do, records an
/// event: it belongs in the middle, give or take half of what lies between. The narrowest of some
/// tries counts, since a busy host may take this thread off its core between the two readings. What
/// was read before had passed by then, so nothing that follows is given an earlier time.
void EventMarks::compare_clocks() {
  USP_CUDA(cudaStreamSynchronize(stream_));
  cudaEvent_t event = take(), spare = take();
  int64_t now = 0, half = INT64_MAX;
  for (int i = 0; i < kTries; ++i) {
    const int64_t before = clock_ns();
    USP_CUDA(cudaEventRecord(spare, stream_));
    USP_CUDA(cudaEventSynchronize(spare));
    const int64_t tried = (clock_ns() - before) / 2;
    if (tried >= half) continue;
    half = tried;
    now = before + half;
    std::swap(event, spare);
  }
  spare_.push_back(spare);
  if (anchor_ != nullptr) {
    const int64_t expected = anchor_ns_ + ns_between(anchor_, event);
    clocks_.drift_ns = std::max(clocks_.drift_ns, std::abs(now - expected));
    spare_.push_back(anchor_);
  }
  anchor_ = event;
  anchor_ns_ = std::max(now, last_ns_);
  ++clocks_.comparisons;
  clocks_.uncertainty_ns = std::max(clocks_.uncertainty_ns, half);
}

}  // namespace usp::cuda
