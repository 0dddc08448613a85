/// Races, bounds, alignment and initialisation of every access of an instrumented kernel.

#include <link.h>

#include <algorithm>

#include "threads.h"

extern char __executable_start, end;  // of the program's image, by the linker

namespace usp::emulator {
namespace {

// Access::thread: a thread, or several of one warp, or of several warps.
constexpr uint16_t kThread = 0x3ff, kAtomic = 0x4000, kSeveralLanes = 0x8000,
                   kSeveralWarps = 0xffff;
constexpr int kWarp = 32;

uint32_t epoch = 1, block_epoch = 1, launch_epoch = 1;
bool everything_initialised = false;

struct Range {
  char* begin = nullptr;
  size_t bytes = 0;
  Cells cells;

  bool holds(const void* address) const {
    return static_cast<size_t>(static_cast<const char*>(address) - begin) < bytes;
  }
};
Range statics, dynamic;  // shared memory: __shared__ variables, what the launch asked for

int find_thread_locals(dl_phdr_info* info, size_t, void* range) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
    static_cast<Range*>(range)->begin = static_cast<char*>(info->dlpi_tls_data);
    static_cast<Range*>(range)->bytes = info->dlpi_phdr[i].p_memsz;
  }
  return 1;  // the executable comes first
}

/// Could the running thread do what it does now before, or after, what is recorded?
USP_INLINE bool unordered(const Access& past, bool shared) {
  if (past.epoch < (shared ? block_epoch : launch_epoch)) return false;
  if (past.epoch < block_epoch) return true;
  if (past.epoch < epoch) return false;
  const int warp = current->number / kWarp;
  if (past.thread == kSeveralWarps) return true;
  if (past.thread & kSeveralLanes) {
    return (past.thread & kThread) != warp || past.clock >= current->clock;
  }
  const int thread = past.thread & kThread;
  return thread != current->number && (thread / kWarp != warp || past.clock >= current->clock);
}

USP_INLINE Access now(uint16_t flags) {
  return {epoch, static_cast<uint16_t>(current->number | flags), current->clock};
}

USP_INLINE void remember_reader(Access& reader, bool shared) {
  const int warp = current->number / kWarp;
  if (reader.epoch < (shared ? block_epoch : launch_epoch)) {
    reader = now(0);
  } else if (reader.epoch < block_epoch) {
    reader = {epoch, kSeveralWarps, 0};  // and another block
  } else if (reader.epoch < epoch || reader.thread == current->number) {
    reader = now(0);
  } else if (reader.thread != kSeveralWarps) {
    const int other =
        reader.thread & kSeveralLanes ? reader.thread & kThread : reader.thread / kWarp;
    reader.thread = other == warp ? static_cast<uint16_t>(kSeveralLanes | warp) : kSeveralWarps;
    reader.clock = std::max(reader.clock, current->clock);
  }
}

/// Notes the access in the cells of its bytes. Says whether it races with an earlier one.
USP_INLINE bool races(std::span<Cell> cells, bool write, bool atomic, bool shared) {
  bool race = false;
  for (Cell& cell : cells) {
    const bool both_atomic = atomic && (cell.writer.thread & kAtomic);
    race |= !both_atomic && unordered(cell.writer, shared);
    if (write) {
      race |= unordered(cell.reader, shared);
      cell.writer = now(atomic ? kAtomic : 0);
    } else {
      remember_reader(cell.reader, shared);
    }
  }
  return race;
}

[[gnu::noinline]] void report_race(bool write, const char* where, const void* pc) {
  problem("race",
          std::string(write ? "writes " : "reads ") + where +
              " memory that another thread uses without a barrier between",
          pc);
}

/// What ends a kernel on a GPU ends it here.
void fault(const std::string& kind, const std::string& detail, const void* pc) {
  problem(kind, detail, pc);
  end_kernel();
}

// Out of the way of accesses in which nothing is wrong.
[[gnu::noinline]] void report_overrun(const Range& range, size_t offset, bool write,
                                      const void* pc) {
  fault("out of bounds",
        (write ? "writes" : "reads") +
            std::string(" beyond the shared memory of the launch, byte ") + std::to_string(offset) +
            " of " + std::to_string(range.cells.bytes()),
        pc);
}
[[gnu::noinline]] void report_uninitialised(const char* detail, const void* pc) {
  problem("uninitialised", detail, pc);
}
[[gnu::noinline]] void report_misaligned(size_t bytes, const void* pc) {
  fault("misaligned", std::to_string(bytes) + " bytes at an address that is no multiple of them",
        pc);
}

void check_global(const void* address, size_t bytes, bool write, bool atomic, const void* pc) {
  Allocation* block = allocation_at(address);
  if (block == nullptr || !block->holds(address, bytes)) {
    const std::string rest =
        block == nullptr
            ? "which is not allocated"
            : "byte " + std::to_string(static_cast<const char*>(address) - block->base) +
                  " of a block of " + std::to_string(block->bytes) + " bytes";
    problem(
        "out of bounds",
        (write ? "writes " : "reads ") + std::to_string(bytes) + " bytes of global memory, " + rest,
        pc);
    return;
  }
  char* initialised = block->initialised + (static_cast<const char*>(address) - block->base);
  if (!write || atomic) {
    if (!everything_initialised && std::memchr(initialised, 0, bytes) != nullptr) {
      report_uninitialised("reads global memory that nothing has written", pc);
    }
  }
  if (write) {
    remember_overwritten(*block, address, bytes);
    std::memset(initialised, 1, bytes);
  }
  if (races(block->cells_of(address, bytes), write, atomic, false))
    report_race(write, "global", pc);
}

USP_INLINE void check_shared(Range& range, const void* address, size_t bytes, bool write,
                             bool atomic, const void* pc) {
  const size_t offset = static_cast<const char*>(address) - range.begin;
  if (offset + bytes > range.cells.bytes()) return report_overrun(range, offset, write, pc);
  const std::span<Cell> cells = range.cells.of(offset, bytes);
  const auto undefined = [](const Cell& cell) { return cell.writer.epoch < block_epoch; };
  if ((!write || atomic) && std::any_of(cells.begin(), cells.end(), undefined)) {
    report_uninitialised("reads shared memory that nothing has written", pc);
  }
  if (races(cells, write, atomic, true)) report_race(write, "shared", pc);
}

/// Registers, stack, constants and kernel parameters, or what a device cannot reach.
void check_other(const void* address, bool write, const void* pc) {
  const char* byte = static_cast<const char*>(address);
  const char* stack = static_cast<const char*>(__builtin_frame_address(0));
  if (byte - stack < ptrdiff_t{64} << 10 && stack - byte < ptrdiff_t{4} << 10) return;
  if (byte >= &__executable_start && byte < &end) return;
  if (is_pinned(address)) return;
  fault("host memory", std::string(write ? "writes" : "reads") + " what only the host can reach",
        pc);
}

}  // namespace

void Cells::refine(size_t multiple) {
  const int before = shift_;
  while ((multiple & ((size_t{1} << shift_) - 1)) != 0) --shift_;
  std::vector<Cell> finer(count());
  for (size_t i = 0; i < finer.size(); ++i) finer[i] = cells_[i >> (before - shift_)];
  cells_ = std::move(finer);
}

bool is_shared(const void* address) { return statics.holds(address) || dynamic.holds(address); }

void check_access(const void* address, size_t bytes, bool write, bool atomic, const void* pc) {
  const bool vector = bytes <= 16 && (bytes & (bytes - 1)) == 0;
  const bool device = is_device(address);
  Range* const shared = statics.holds(address)   ? &statics
                        : dynamic.holds(address) ? &dynamic
                                                 : nullptr;
  if (vector && (device || shared != nullptr) &&
      (reinterpret_cast<uintptr_t>(address) & (bytes - 1)) != 0) {
    report_misaligned(bytes, pc);
  }
  if (device) {
    check_global(address, bytes, write, atomic, pc);
  } else if (shared != nullptr) {
    check_shared(*shared, address, bytes, write, atomic, pc);
  } else {
    check_other(address, write, pc);
  }
}

void begin_launch(size_t dynamic_bytes) {
  launch_epoch = ++epoch;
  dl_iterate_phdr(find_thread_locals, &statics);
  if (statics.cells.bytes() != statics.bytes) statics.cells = Cells(statics.bytes);
  dynamic.begin = static_cast<char*>(dynamic_shared_memory());
  dynamic.bytes = kMaxDynamicBytes;
  if (dynamic.cells.bytes() != dynamic_bytes) dynamic.cells = Cells(dynamic_bytes);
}

void begin_block() { block_epoch = ++epoch; }

void begin_epoch() { ++epoch; }

void forget_initialised() { everything_initialised = true; }

void check_read(const void* address, size_t bytes, const char* who) {
  if (!is_allocated(address, bytes)) {
    problem("out of bounds", std::string(who) + " reads what is not one block of device memory",
            nullptr);
  } else if (!everything_initialised) {
    const Allocation* block = allocation_at(address);
    const char* initialised =
        block->initialised + (static_cast<const char*>(address) - block->base);
    if (std::memchr(initialised, 0, bytes) != nullptr) {
      problem("uninitialised", std::string(who) + " reads global memory that nothing has written",
              nullptr);
    }
  }
}

}  // namespace usp::emulator
