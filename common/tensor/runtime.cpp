#include "tensor/runtime.h"

#include "base/check.h"
#include "tensor/backend.h"

namespace usp {

namespace {

thread_local Runtime* current_runtime = nullptr;

}  // namespace

Runtime::Runtime(Device device, int rank, int world_size) : rank_(rank), world_size_(world_size) {
  move_to(device);
}

void Runtime::move_to(Device device) {
  if (device == Device::cuda) {
    const std::shared_ptr<Accelerator> accelerator = make_cuda_device(rank_);
    allocator_ = std::make_shared<Allocator>(device, accelerator);
    host_allocator_ = std::make_shared<Allocator>(Device::cpu, accelerator);
    backend_ = accelerator->make_backend();
  } else {
    allocator_ = host_allocator_ = std::make_shared<Allocator>(device);
    backend_ = device == Device::meta ? make_meta_backend() : make_cpu_backend();
  }
  tracer_.take_times_from(allocator_->accelerator());
}

void Runtime::wait() {
  if (accelerator() != nullptr) accelerator()->wait();
}

Backend& Runtime::host_backend() {
  if (host_backend_ == nullptr) host_backend_ = make_cpu_backend();
  return *host_backend_;
}

Runtime::~Runtime() = default;

Runtime& Runtime::current() {
  USP_CHECK(current_runtime != nullptr, "this thread has no Runtime: construct a Runtime::Use");
  return *current_runtime;
}

Runtime* Runtime::find() { return current_runtime; }

bool speaks_for_all() { return current_runtime == nullptr || current_runtime->rank() == 0; }

Runtime::Use::Use(Runtime& runtime) : previous_(current_runtime) { current_runtime = &runtime; }

Runtime::Use::~Use() { current_runtime = previous_; }

}  // namespace usp
