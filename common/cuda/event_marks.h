#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "tensor/marks.h"

namespace usp::cuda {

/// Marks that are CUDA events. An event serves again once its time was read, so that steps that are
/// alike need no more of them than the first one.
class EventMarks : public Marks {
 public:
  /// `stream`: where make() makes them.
  explicit EventMarks(cudaStream_t stream) : stream_(stream) {}
  ~EventMarks() override;
  EventMarks(const EventMarks&) = delete;
  EventMarks& operator=(const EventMarks&) = delete;

  void begin() override;
  int64_t make() override { return make(stream_); }
  /// The same in another stream of the device. For any thread.
  int64_t make(cudaStream_t stream);
  void read() override;
  void forget() override;
  void end() override;
  int64_t time_of(int64_t mark) const override;
  Clocks clocks() const override { return clocks_; }

 private:
  struct Pending {
    int64_t number;
    cudaEvent_t event;
  };
  cudaEvent_t take();
  void read_passed();
  void compare_clocks();

  cudaStream_t stream_;
  std::atomic<bool> on_ = false;

  mutable std::mutex mutex_;  ///< guards what follows
  std::vector<cudaEvent_t> spare_;
  std::vector<Pending> pending_;  ///< not read yet
  std::vector<int64_t> times_;    ///< of all marks from first_ on, by number
  int64_t first_ = 0;             ///< those before are forgotten
  cudaEvent_t anchor_ = nullptr;  ///< where the clocks were compared
  int64_t anchor_ns_ = 0;         ///< the host's clock there
  int64_t last_ns_ = 0;           ///< the latest time read
  Clocks clocks_;
};

}  // namespace usp::cuda
