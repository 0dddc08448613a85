#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "cuda/cuda_backend.h"
#include "cuda/errors.h"
#include "cuda/event_marks.h"
#include "tensor/device.h"
#include "tensor/device_group.h"

namespace usp::cuda {

/// Pinned buffers from which small pieces go to the device while the host goes on.
///
/// A buffer serves again when its copy is over. Where none is free the ring takes one more, up to a
/// limit; only beyond that does the host wait, for the oldest.
class UploadRing {
 public:
  static constexpr int64_t kBufferBytes = 256 << 10;
  static constexpr size_t kMaxBuffers = 256;

  UploadRing() = default;
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  /// Queues a copy of up to kBufferBytes. Returns whether the host had to wait.
  bool upload(void* to, const void* from, int64_t bytes, cudaStream_t stream);

 private:
  struct Buffer {
    void* memory;
    cudaEvent_t copied;
  };
  bool make_room();

  std::deque<Buffer> buffers_;  ///< in the order of their last use, the longest ago first
};

/// A GPU by CUDA's runtime: one stream, on which everything of a rank happens, and one in each
/// direction for what it sends to other ranks by way of the host. NCCL has streams of its own.
class CudaDevice : public Accelerator, public SideCopies, public DeviceLibrary {
 public:
  /// `index` as CUDA numbers the GPUs. Throws UsageError where there is none to use.
  explicit CudaDevice(int index);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  std::string description() const override;
  std::string matmul_library() const override;
  void require(DType dtype) const override;
  std::unique_ptr<Backend> make_backend() override;
  std::vector<std::string> remarks() const override;

  void* take(Device where, int64_t bytes) override;
  void give_back(Device where, void* pointer) override;
#ifdef USP_CUDA_IS_EMULATED
  void released(void* pointer, int64_t bytes) override {
    static_cast<void>(emulator::mark_undefined(pointer, static_cast<size_t>(bytes), stream_));
  }
#endif
  int64_t available_memory() override;

  void upload(void* to, const void* from, int64_t bytes) override;
  void download(void* to, const void* from, int64_t bytes) override;
  void clear(void* to, int64_t bytes) override;
  void wait() override;

  void begin_range(const char* name) override;
  void end_range() override;

  Marks& marks() override { return *marks_; }
  std::unique_ptr<Marks> make_marks() override { return std::make_unique<EventMarks>(stream_); }

  // side_copies.cpp
  std::string address() const override;
  std::shared_ptr<Event> download(std::span<const Copy> copies) override;
  std::shared_ptr<Event> upload(std::span<const Copy> copies) override;
  void hold_work_until(Event& event) override;

  // nccl_group.cpp
  void require() override;
  std::string why_not_shared() override;
  std::string new_group_id() override;
  std::unique_ptr<DeviceGroup> join(const std::string& id, int ranks, int rank) override;
  std::unique_ptr<DeviceGroup> join_pair(const std::string& id, bool sends) override;
  std::vector<std::shared_ptr<Event>> start(std::span<const Start> calls) override;

  cudaStream_t stream() const { return stream_; }

 private:
  class SideEvent;
  class NcclGroup;
  /// What `stream` is given from here on begins when the kernels queued so far have ended.
  void let_follow_work(cudaStream_t stream);
  /// A point of a stream behind `bytes` bytes, which began at a mark.
  std::shared_ptr<Event> record(cudaStream_t stream, int64_t begin_mark, int64_t bytes);

  /// Threads begin with GPU 0. One that asks there about another makes a context on it besides.
  void use() const;

  int index_;
  void* connecting_ = nullptr;  ///< what a pair of NCCL's first sends
  cudaStream_t stream_ = nullptr;
  cudaStream_t down_ = nullptr, up_ = nullptr;  ///< made with the first message
  UploadRing ring_;
  std::optional<EventMarks> marks_;  ///< made with the stream
  BackendCounts counts_;
};

}  // namespace usp::cuda
