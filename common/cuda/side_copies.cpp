#include "cuda/cuda_device.h"
#include "cuda/errors.h"

namespace usp::cuda {

/// Belongs to one point of one stream.
class CudaDevice::SideEvent : public SideCopies::Event {
 public:
  SideEvent(CudaDevice& device, cudaStream_t stream) : device_(device) {
    // Who waits for it sleeps: ranks may have fewer cores than threads.
    USP_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync));
    USP_CUDA(cudaEventRecord(event_, stream));
  }
  ~SideEvent() override { static_cast<void>(cudaEventDestroy(event_)); }
  SideEvent(const SideEvent&) = delete;
  SideEvent& operator=(const SideEvent&) = delete;

  bool passed() override {
    device_.use();
    const cudaError_t status = cudaEventQuery(event_);
    if (status != cudaErrorNotReady) USP_CUDA(status);
    return status == cudaSuccess;
  }
  void wait() override {
    if (passed()) return;
    device_.count_wait();
    USP_CUDA(cudaEventSynchronize(event_));
  }
  cudaEvent_t get() const { return event_; }

 private:
  CudaDevice& device_;
  cudaEvent_t event_ = nullptr;
};

std::shared_ptr<SideCopies::Event> CudaDevice::record(cudaStream_t stream, int64_t begin_mark,
                                                      int64_t bytes) {
  // Who finds the event passed finds the mark passed, too.
  const int64_t end_mark = marks_->make(stream);
  auto event = std::make_shared<SideEvent>(*this, stream);
  event->bytes = bytes;
  event->begin_mark = begin_mark;
  event->end_mark = end_mark;
  return event;
}

void CudaDevice::use() const { USP_CUDA(cudaSetDevice(index_)); }

void CudaDevice::let_follow_work(cudaStream_t stream) {
  const SideEvent so_far(*this, stream_);
  USP_CUDA(cudaStreamWaitEvent(stream, so_far.get()));
}

std::string CudaDevice::address() const {
  char address[32] = {};
  USP_CUDA(cudaDeviceGetPCIBusId(address, sizeof(address), index_));
  return address;
}

std::shared_ptr<SideCopies::Event> CudaDevice::download(std::span<const Copy> copies) {
  if (down_ == nullptr) {
    USP_CUDA(cudaStreamCreateWithFlags(&down_, cudaStreamNonBlocking));
    USP_CUDA(cudaStreamCreateWithFlags(&up_, cudaStreamNonBlocking));
  }
  let_follow_work(down_);
  const int64_t mark = marks_->make(down_);
  int64_t bytes = 0;
  for (const Copy& copy : copies) {
    USP_CUDA(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToHost, down_));
    bytes += copy.bytes;
  }
  return record(down_, mark, bytes);
}

std::shared_ptr<SideCopies::Event> CudaDevice::upload(std::span<const Copy> copies) {
  use();
  const int64_t mark = marks_->make(up_);
  int64_t bytes = 0;
  for (const Copy& copy : copies) {
    USP_CUDA(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyHostToDevice, up_));
    bytes += copy.bytes;
  }
  return record(up_, mark, bytes);
}

void CudaDevice::hold_work_until(Event& event) {
  USP_CUDA(cudaStreamWaitEvent(stream_, static_cast<SideEvent&>(event).get()));
}

}  // namespace usp::cuda
