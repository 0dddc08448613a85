/// What -fsanitize=thread and -fsanitize-coverage=trace-pc call in instrumented files. The thread
/// sanitizer's own library, which defines the same names, is not linked.

#include <atomic>

#include "threads.h"

using namespace usp::emulator;

namespace {

USP_INLINE void access(const void* address, size_t bytes, bool write, bool atomic, const void* pc) {
  if (current == nullptr) return;  // host code of the same file
  // Most are of the thread's own stack: registers on a GPU.
  if (address >= __builtin_frame_address(0) && address < current->stack_end) {
    if (address >= current->watch_begin && address < current->watch_end) {
      check_registers(address, bytes, write, pc);
    }
    return;
  }
  if (options.checks) check_access(address, bytes, write, atomic, pc);
  if (!options.counters) return;
  const bool shared = is_shared(address);
  if (shared || is_device(address)) {
    current->log->push_back({pc, address, static_cast<uint32_t>(bytes), write, shared, atomic});
  }
}

template <class T, class F>
T atomically(T* address, const void* pc, F next) {
  access(address, sizeof(T), true, true, pc);
  const T old = *address;
  *address = next(old);
  return old;
}

}  // namespace

#define USP_PC __builtin_return_address(0)
#define USP_ACCESS(bytes)                                                                  \
  void __tsan_read##bytes(void* address) { access(address, bytes, false, false, USP_PC); } \
  void __tsan_write##bytes(void* address) { access(address, bytes, true, false, USP_PC); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
USP_ACCESS(1)
USP_ACCESS(2)
USP_ACCESS(4)
USP_ACCESS(8)
USP_ACCESS(16)
void __tsan_read_range(void* address, size_t bytes) {
  access(address, bytes, false, false, USP_PC);
}
void __tsan_write_range(void* address, size_t bytes) {
  access(address, bytes, true, false, USP_PC);
}

void __sanitizer_cov_trace_pc() {
  if (current == nullptr || !options.counters) return;
  current->log->push_back({USP_PC, nullptr, 0, false, false, false});
}

// Of host code: what std::shared_ptr and std::atomic become.
#define USP_ATOMIC(bits, T)                                                                     \
  T __tsan_atomic##bits##_load(const volatile T* at, int) { return __atomic_load_n(at, 5); }    \
  void __tsan_atomic##bits##_store(volatile T* at, T value, int) {                              \
    __atomic_store_n(at, value, 5);                                                             \
  }                                                                                             \
  T __tsan_atomic##bits##_exchange(volatile T* at, T value, int) {                              \
    return __atomic_exchange_n(at, value, 5);                                                   \
  }                                                                                             \
  T __tsan_atomic##bits##_fetch_add(volatile T* at, T value, int) {                             \
    return __atomic_fetch_add(at, value, 5);                                                    \
  }                                                                                             \
  T __tsan_atomic##bits##_fetch_sub(volatile T* at, T value, int) {                             \
    return __atomic_fetch_sub(at, value, 5);                                                    \
  }                                                                                             \
  T __tsan_atomic##bits##_fetch_or(volatile T* at, T value, int) {                              \
    return __atomic_fetch_or(at, value, 5);                                                     \
  }                                                                                             \
  T __tsan_atomic##bits##_fetch_and(volatile T* at, T value, int) {                             \
    return __atomic_fetch_and(at, value, 5);                                                    \
  }                                                                                             \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* at, T* expected, T value, int, \
                                                     int) {                                     \
    return __atomic_compare_exchange_n(at, expected, value, false, 5, 5);                       \
  }                                                                                             \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile T* at, T* expected, T value, int,   \
                                                   int) {                                       \
    return __atomic_compare_exchange_n(at, expected, value, true, 5, 5);                        \
  }
USP_ATOMIC(8, uint8_t)
USP_ATOMIC(16, uint16_t)
USP_ATOMIC(32, uint32_t)
USP_ATOMIC(64, uint64_t)
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}
}

#define USP_ATOMIC_ADD(T)                                                   \
  T atomicAdd(T* address, T value) {                                        \
    return atomically(address, USP_PC, [&](T old) { return old + value; }); \
  }
USP_ATOMIC_ADD(int)
USP_ATOMIC_ADD(unsigned)
USP_ATOMIC_ADD(unsigned long long)
USP_ATOMIC_ADD(float)
USP_ATOMIC_ADD(double)
int atomicMax(int* address, int value) {
  return atomically(address, USP_PC, [&](int old) { return std::max(old, value); });
}
int atomicExch(int* address, int value) {
  return atomically(address, USP_PC, [&](int) { return value; });
}
int atomicCAS(int* address, int compare, int value) {
  return atomically(address, USP_PC, [&](int old) { return old == compare ? value : old; });
}
