#include "tensor/runtime.h"

#include "base/check.h"
#include "tensor/backend.h"

namespace usp {

namespace {

thread_local Runtime* current_runtime = nullptr;

}  // namespace

Runtime::Runtime(Device device, int rank, int world_size)
    : allocator_(std::make_shared<Allocator>(device)),
      backend_(device == Device::meta ? make_meta_backend() : make_cpu_backend()),
      rank_(rank),
      world_size_(world_size) {}

Runtime::~Runtime() = default;

Runtime& Runtime::current() {
  USP_CHECK(current_runtime != nullptr, "this thread has no Runtime: construct a Runtime::Use");
  return *current_runtime;
}

bool speaks_for_all() { return current_runtime == nullptr || current_runtime->rank() == 0; }

Runtime::Use::Use(Runtime& runtime) : previous_(current_runtime) { current_runtime = &runtime; }

Runtime::Use::~Use() { current_runtime = previous_; }

}  // namespace usp
