/// Races, bounds, alignment and initialisation of every access of an instrumented kernel.

#include <link.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "threads.h"

extern char __executable_start, end;  // of the program's image, by the linker

namespace usp::emulator {
namespace {

// Access::thread: a thread, or several of one warp, or of several warps; a set of readers, or a
// bulk copy.
constexpr uint16_t kThread = 0x3ff, kAsync = 0x1000, kSet = 0x2000, kAtomic = 0x4000,
                   kSeveralLanes = 0x8000, kSeveralLaunches = 0xfffe, kSeveralWarps = 0xffff;
constexpr uint32_t kNoEpoch = ~uint32_t{0};  // of readers in several launches
constexpr int kWarp = 32;

uint32_t epoch = 1, block_epoch = 1, launch_epoch = 1;
uint32_t known_epoch = 1;      // all launches before are over when the running one begins
Work running_call{};           // the running operation, where it is no kernel
const Work* racing = nullptr;  // the other side of the race that was found last, if of a stream
/// Launches that read the same, in streams that nothing orders: by their first epochs. A reader
/// that is one of these has its place as clock.
std::vector<std::vector<uint32_t>> reading_launches;
/// Lanes of a warp that read something at the same time of its clocks.
struct Readers {
  uint32_t lanes, releases;
  uint16_t warp, clock;
};
std::vector<std::vector<Readers>> reader_sets;  // of the block
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

/// May the launch go on beside the running one?
[[gnu::noinline]] bool unordered_launch(uint32_t of_launch) {
  const Work* work = unordered_work(of_launch);
  if (work != nullptr) racing = work;
  return work != nullptr;
}
[[gnu::noinline]] bool unordered_launches(const Access& readers) {
  return std::ranges::any_of(reading_launches[readers.clock], unordered_launch);
}

[[gnu::noinline]] bool unordered_set(const Access& past) {
  for (const Readers& readers : reader_sets[past.releases]) {
    if (readers.warp == current->number / kWarp && readers.clock < current->clock) continue;
    for (uint32_t lanes = readers.lanes; lanes != 0; lanes &= lanes - 1) {
      const int thread = readers.warp * kWarp + std::countr_zero(lanes);
      if (thread == current->number) continue;
      if (!covers(current->seen, thread, readers.clock, readers.releases)) return true;
    }
  }
  return false;
}

/// Could the running thread do what it does now before, or after, what is recorded?
USP_INLINE bool unordered(const Access& past, bool shared) {
  if (past.epoch < (shared ? block_epoch : launch_epoch)) {
    return !shared && past.epoch >= known_epoch && unordered_launch(past.epoch);
  }
  if (past.epoch < block_epoch) return true;
  if (past.epoch < epoch) return false;
  const int warp = current->number / kWarp;
  if (past.thread >= kSeveralLaunches) {
    return past.thread == kSeveralWarps || unordered_launches(past);
  }
  if (past.thread & kAsync) return false;  // check_async() knows
  if (past.thread & kSet) return unordered_set(past);
  if (past.thread & kSeveralLanes) {
    return (past.thread & kThread) != warp || past.clock >= current->clock;
  }
  const int thread = past.thread & kThread;
  return thread != current->number && (thread / kWarp != warp || past.clock >= current->clock) &&
         !covers(current->seen, thread, past.clock, past.releases);
}

USP_INLINE Access now(uint16_t flags) {
  return {epoch, static_cast<uint16_t>(current->number | flags), current->clock, current->releases};
}

void remember_in_set(Access& reader) {
  if (!(reader.thread & kSet)) {
    const Readers first{1u << reader.thread % kWarp, reader.releases,
                        static_cast<uint16_t>((reader.thread & kThread) / kWarp), reader.clock};
    reader.releases = static_cast<uint32_t>(reader_sets.size());
    reader.thread = kSet;
    reader_sets.push_back({first});
  }
  reader.epoch = epoch;
  std::vector<Readers>& set = reader_sets[reader.releases];
  const uint16_t warp = static_cast<uint16_t>(current->number / kWarp);
  for (Readers& readers : set) {
    if (readers.warp == warp && readers.clock == current->clock &&
        readers.releases == current->releases) {
      readers.lanes |= 1u << current->lane;
      return;
    }
  }
  // What this lane read before is before what it reads now.
  for (Readers& readers : set) {
    if (readers.warp == warp) readers.lanes &= ~(1u << current->lane);
  }
  std::erase_if(set, [](const Readers& readers) { return readers.lanes == 0; });
  set.push_back({1u << current->lane, current->releases, warp, current->clock});
}

/// Launches that read, and now the running one too, by `mine`. `readers` is one of them, or
/// several.
[[gnu::noinline]] void remember_launch(Access& readers, const Access& mine) {
  std::vector<uint32_t> launches{readers.epoch};
  if (readers.epoch == kNoEpoch) launches = reading_launches[readers.clock];
  std::erase_if(launches, [](uint32_t launch) { return unordered_work(launch) == nullptr; });
  if (launches.empty()) {
    readers = mine;
    return;
  }
  launches.push_back(launch_epoch);
  size_t place = reading_launches.size();  // the newest first
  while (place > 0 && reading_launches[place - 1] != launches) --place;
  if (place == 0) {
    if (reading_launches.size() > kSeveralWarps) return;
    reading_launches.push_back(std::move(launches));
    place = reading_launches.size();
  }
  readers = {kNoEpoch, kSeveralLaunches, static_cast<uint16_t>(place - 1), 0};
}

USP_INLINE void remember_reader(Access& reader, bool shared) {
  const int warp = current->number / kWarp;
  if (reader.epoch < (shared ? block_epoch : launch_epoch)) {
    if (!shared && reader.epoch >= known_epoch) return remember_launch(reader, now(0));
    reader = now(0);
  } else if (reader.epoch == kNoEpoch) {
    remember_launch(reader, now(0));
  } else if (reader.epoch < block_epoch) {
    reader = {epoch, kSeveralWarps, 0, 0};  // and another block
  } else if (reader.epoch < epoch || reader.thread == current->number) {
    reader = now(0);
  } else if (clocks_used && !(reader.thread & kSeveralLanes)) {
    remember_in_set(reader);
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
  const std::string access = std::string(write ? "writes " : "reads ") + where + " memory that ";
  if (const Work* work = std::exchange(racing, nullptr)) {
    problem("race", access + work->what + " of another stream uses without an event between", pc,
            work->place);
  } else {
    problem("race", access + "another thread uses without a barrier between", pc);
  }
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
  if (async_used && &range == &dynamic) check_async(offset, bytes, write, pc);
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

void check_copy(const void* address, size_t bytes, bool write, const void* pc) {
  check_global(address, bytes, write, false, pc);
}

void begin_launch(const Launch& launch, bool checked) {
  const size_t dynamic_bytes = launch.dynamic_bytes;
  launch_epoch = ++epoch;
  known_epoch = checked ? note_work(epoch, {"a kernel", place_of(launch.kernel)}) : epoch;
  dl_iterate_phdr(find_thread_locals, &statics);
  if (statics.cells.bytes() != statics.bytes) statics.cells = Cells(statics.bytes);
  dynamic.begin = static_cast<char*>(dynamic_shared_memory());
  dynamic.bytes = kMaxDynamicBytes;
  if (dynamic.cells.bytes() != dynamic_bytes) dynamic.cells = Cells(dynamic_bytes);
}

void begin_block() {
  block_epoch = ++epoch;
  reader_sets.clear();
}

bool is_before(const Access& past) { return !unordered(past, true); }

Access access_now() { return now(0); }

void check_proxy(const void* address, size_t bytes, bool write,
                 const std::vector<const Clocks*>& seen, int warp, int thread, const void* pc) {
  const size_t offset = static_cast<const char*>(address) - dynamic.begin;
  if (offset + bytes > dynamic.cells.bytes()) return report_overrun(dynamic, offset, write, pc);
  const auto known = [&](int other, uint16_t clock, uint32_t releases) {
    if (thread >= 0 ? other == thread : other / kWarp == warp) return true;
    for (const Clocks* clocks : seen) {
      if (covers(clocks, other, clock, releases)) return true;
    }
    return false;
  };
  // Is there a fence after an access at that stamp, and before this?
  const auto fenced = [&](int other, uint32_t releases) {
    for (const KernelThread::Fence& fence : thread_of_block(other).fences) {
      if (fence.releases < releases) continue;
      return fence.epoch < epoch || known(other, fence.clock, fence.releases);
    }
    return false;
  };
  for (Cell& cell : dynamic.cells.of(offset, bytes)) {
    const Access& past = cell.writer;
    if (past.epoch < block_epoch) {
      if (!write)
        report_uninitialised("lets wgmma or a copy read shared memory that nothing has written",
                             pc);
    } else if (!(past.thread & kAsync)) {
      const int other = past.thread & kThread;
      if (past.epoch == epoch && !known(other, past.clock, past.releases)) {
        problem("race",
                write ? "lets a copy overwrite what a thread writes without a barrier between"
                      : "lets wgmma or a copy read what a thread writes without a barrier between",
                pc);
      } else if (!fenced(other, past.releases)) {
        problem("proxy",
                "wgmma or a copy uses shared memory that a thread wrote, without "
                "fence_proxy_async after the write",
                pc);
      }
    }
    if (!write || cell.reader.epoch < block_epoch) continue;
    bool race = false, unfenced = false;
    const auto look = [&](int other, uint16_t clock, uint32_t releases) {
      race |= cell.reader.epoch == epoch && !known(other, clock, releases);
      unfenced |= !fenced(other, releases);
    };
    if (cell.reader.thread & kSet) {
      for (const Readers& readers : reader_sets[cell.reader.releases]) {
        for (uint32_t lanes = readers.lanes; lanes != 0; lanes &= lanes - 1) {
          look(readers.warp * kWarp + __builtin_ctz(lanes), readers.clock, readers.releases);
        }
      }
    } else if (!(cell.reader.thread & kSeveralLanes)) {
      look(cell.reader.thread & kThread, cell.reader.clock, cell.reader.releases);
    }
    if (race) {
      problem("race", "lets a copy overwrite what a thread reads without a barrier between", pc);
    } else if (unfenced) {
      problem("proxy",
              "lets a copy overwrite what a thread read, without fence_proxy_async after the read",
              pc);
    }
  }
}

void mark_written(const void* address, size_t bytes, bool by_thread) {
  const size_t offset = static_cast<const char*>(address) - dynamic.begin;
  if (offset + bytes > dynamic.cells.bytes()) return;
  for (Cell& cell : dynamic.cells.of(offset, bytes)) {
    cell.writer = by_thread ? now(0) : Access{epoch, kAsync, 0, 0};
    cell.reader = {};
  }
}

uint32_t current_epoch() { return epoch; }

void begin_epoch() { ++epoch; }

void forget_initialised() { everything_initialised = true; }

void begin_call(const Work& work) {
  running_call = work;
  launch_epoch = block_epoch = ++epoch;
  known_epoch = note_work(epoch, work);
}

void check_call(const void* address, size_t bytes, bool write) {
  if (!options.checks || everything_initialised || !is_allocated(address, bytes)) return;
  const Access mine{epoch, 0, 0, 0};
  // Most cells are like the one before.
  uint32_t asked = 0;
  bool answer = false;
  const auto unordered = [&](const Access& past) {
    if (past.epoch == kNoEpoch) return unordered_launches(past);
    if (past.epoch < known_epoch || past.epoch >= launch_epoch) return false;
    if (asked != past.epoch) answer = unordered_launch(asked = past.epoch);
    return answer;
  };
  bool race = false;
  for (Cell& cell : allocation_at(address)->cells_of(address, bytes)) {
    race |= unordered(cell.writer);
    if (write) {
      race |= unordered(cell.reader);
      cell.writer = mine;
    } else if (cell.reader.epoch < known_epoch) {
      cell.reader = mine;
    } else if (cell.reader.epoch != epoch) {
      remember_launch(cell.reader, mine);
    }
  }
  if (!race) return;
  const Work& other = *std::exchange(racing, nullptr);
  problem("race",
          std::string(running_call.what) + (write ? " writes" : " reads") + " global memory that " +
              other.what + " of another stream uses without an event between",
          running_call.place, other.place);
}

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
