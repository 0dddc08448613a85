/// Blocks of device and pinned memory, copies and fills.

#include <algorithm>
#include <cstdlib>
#include <map>

#include "streams.h"

namespace usp::emulator {
namespace {

std::map<const char*, size_t>& pinned() {
  static auto* blocks = new std::map<const char*, size_t>;
  return *blocks;
}

struct Copy {
  const void* place;  // of the call
  char* to;
  size_t to_pitch;
  const char* from;
  size_t from_pitch, width, height;
  bool to_device, from_device;
};

/// Rows of `width` bytes, `pitch` apart, that lie on the device in one block; or on the host.
bool fits(const void* address, size_t pitch, const Copy& copy, bool device) {
  const size_t extent = (copy.height - 1) * pitch + copy.width;
  return device ? is_allocated(address, extent) : !is_device(address) && address != nullptr;
}

void run(const Copy& copy) {
  begin_call({"a copy", copy.place});
  for (size_t row = 0; row < copy.height; ++row) {
    char* to = copy.to + row * copy.to_pitch;
    const char* from = copy.from + row * copy.from_pitch;
    check_call(from, copy.width, false);
    check_call(to, copy.width, true);
    if (copy.to_device && copy.from_device) {
      Allocation *there = allocation_at(to), *here = allocation_at(from);
      std::memmove(there->initialised + (to - there->base), here->initialised + (from - here->base),
                   copy.width);
    } else if (copy.to_device) {
      allocation_at(to)->set_initialised(to, copy.width, true);
    } else if (copy.from_device) {
      check_read(from, copy.width, "a copy to the host");
    }
    std::memmove(to, from, copy.width);
  }
}

/// Queues a copy, about which the options may want to know.
void queue(const Copy& copy, cudaStream_t stream, std::function<void()> work) {
  const HostCopy told{copy.to, copy.from, copy.width * copy.height, copy.to_device};
  if (copy.to_device == copy.from_device) return enqueue(stream, told.bytes, std::move(work));
  if (options.copies) options.copies->queued(told);
  enqueue_when(
      stream, told.bytes, [told] { return !options.copies || options.copies->may_begin(told); },
      [told, work = std::move(work)] {
        work();
        if (options.copies) options.copies->over(told);
      });
}

cudaError_t start(Copy copy, cudaMemcpyKind kind, cudaStream_t stream) {
  if (!is_stream(stream) || !of_this_device(stream, "a copy"))
    return cudaErrorInvalidResourceHandle;
  if (copy.width == 0 || copy.height == 0) return cudaSuccess;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
    return cudaErrorInvalidMemcpyDirection;
  if (copy.height > 1 && (copy.to_pitch < copy.width || copy.from_pitch < copy.width)) {
    return cudaErrorInvalidPitchValue;
  }
  const bool guess = kind == cudaMemcpyDefault;
  copy.to_device = guess ? is_device(copy.to) : kind & 1 || kind == cudaMemcpyDeviceToDevice;
  copy.from_device = guess ? is_device(copy.from) : (kind & 2) != 0;
  if (!fits(copy.to, copy.to_pitch, copy, copy.to_device) ||
      !fits(copy.from, copy.from_pitch, copy, copy.from_device)) {
    return cudaErrorInvalidValue;
  }
  const size_t bytes = copy.width * copy.height;
  if (!copy.from_device && !is_pinned(copy.from)) {  // what the driver stages before it returns
    std::vector<char> staged(bytes);
    for (size_t row = 0; row < copy.height; ++row) {
      std::copy_n(copy.from + row * copy.from_pitch, copy.width, staged.data() + row * copy.width);
    }
    copy.from_pitch = copy.width;
    queue(copy, stream, [copy, staged = std::move(staged)]() mutable {
      copy.from = staged.data();
      run(copy);
    });
  } else {
    queue(copy, stream, [copy] { run(copy); });
  }
  return copy.to_device || is_pinned(copy.to) ? cudaSuccess : wait_for(stream);
}

cudaError_t copy(const void* place, void* to, size_t to_pitch, const void* from, size_t from_pitch,
                 size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return remember(start({place, static_cast<char*>(to), to_pitch, static_cast<const char*>(from),
                         from_pitch, width, height, false, false},
                        kind, stream));
}

cudaError_t fill(const Work& work, void* address, int value, size_t bytes, bool initialised,
                 cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!is_stream(stream) || !of_this_device(stream, "a fill"))
    return cudaErrorInvalidResourceHandle;
  if (!is_allocated(address, bytes)) return cudaErrorInvalidValue;
  enqueue(stream, initialised ? bytes : kNoTime, [=] {
    begin_call(work);
    check_call(address, bytes, true);
    std::memset(address, value, bytes);
    allocation_at(address)->set_initialised(address, bytes, initialised);
  });
  return cudaSuccess;
}

}  // namespace

size_t pinned_bytes() {
  const Locked locked(lock());
  size_t sum = 0;
  for (const auto& [address, bytes] : pinned()) sum += bytes;
  return sum;
}

bool is_pinned(const void* address) {
  const char* byte = static_cast<const char*>(address);
  const auto next = pinned().upper_bound(byte);
  if (next == pinned().begin()) return false;
  const auto [begin, bytes] = *std::prev(next);
  return byte < begin + bytes;
}

cudaError_t mark_undefined(void* address, size_t bytes, cudaStream_t stream) {
  const Locked locked(lock());
  return remember(fill({"the allocator", USP_PLACE}, address, 0xff, bytes, false, stream));
}

}  // namespace usp::emulator

using namespace usp::emulator;

#define USP_CALL()             \
  const Locked locked(lock()); \
  if (const cudaError_t error = ready(); error != cudaSuccess) return remember(error)

cudaError_t cudaMalloc(void** address, size_t bytes) {
  USP_CALL();
  *address = bytes == 0 ? nullptr : allocate(bytes, current_device());
  return remember(bytes > 0 && *address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFree(void* address) {
  USP_CALL();
  wait_for_all();
  return remember(address == nullptr || release(address) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMallocHost(void** address, size_t bytes) {
  return cudaHostAlloc(address, bytes, cudaHostAllocDefault);
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  USP_CALL();
  constexpr size_t kPage = 4096;
  *address = bytes == 0 ? nullptr : std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (*address != nullptr) pinned()[static_cast<char*>(*address)] = bytes;
  return remember(bytes > 0 && *address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFreeHost(void* address) {
  USP_CALL();
  wait_for_all();
  if (address == nullptr) return cudaSuccess;
  if (pinned().erase(static_cast<char*>(address)) == 0) return remember(cudaErrorInvalidValue);
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  USP_CALL();
  const cudaError_t error = copy(USP_PLACE, to, bytes, from, bytes, bytes, 1, kind, nullptr);
  return error != cudaSuccess ? error : remember(wait_for(nullptr));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  USP_CALL();
  return copy(USP_PLACE, to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  USP_CALL();
  return copy(USP_PLACE, to, to_pitch, from, from_pitch, width, height, kind, stream);
}

cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  USP_CALL();
  return remember(fill({"a fill", USP_PLACE}, address, value, bytes, true, nullptr));
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  USP_CALL();
  return remember(fill({"a fill", USP_PLACE}, address, value, bytes, true, stream));
}
