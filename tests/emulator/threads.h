#pragma once

#include "internal.h"

#define USP_INLINE [[gnu::always_inline]] inline  // on the way of each access, and of each turn

namespace usp::emulator {

/// What others did that is known to be over: for each thread a number of releases, each warp a
/// clock, each mbarrier its phases, each warpgroup its groups of products, each thread its groups
/// of stores. Lives as long as the block.
struct Clocks {
  std::vector<uint32_t> of;
  uint32_t epoch = 0;  // of the clocks of warps
};
inline constexpr int kBarriers = 64, kWarpgroups = 8;

/// One thread of the running block, as hooks and checks see it.
struct KernelThread {
  uint3 index{};
  int number = 0, lane = 0;  // in its block, in its warp
  uint16_t clock = 0;        // operations of its warp since the last barrier, as far as it knows
  uint32_t releases = 0;     // how often it let others see what it did, in this block
  struct Fence {
    uint32_t epoch, releases;
    uint16_t clock;
  };
  std::vector<Fence> fences;  // after which the async proxy sees what the thread did
  uint32_t barriers_fenced = 0;
  const Clocks* seen = nullptr;  // what it knows of others since the block began
  const char *watch_begin = nullptr, *watch_end = nullptr;  // around registers that wgmma uses
  std::vector<Event>* log = nullptr;
  const void* stack_end = nullptr;
};

/// What a thread waits for that is no barrier of its block or warp.
struct Condition {
  virtual bool over() = 0;
  virtual std::string text() = 0;  // of a deadlock

 protected:
  ~Condition() = default;
};
/// Called by a thread: others go on until the condition holds.
void park(Condition& condition, const void* pc);
/// What all lanes of the warp give, once they have come; what they did before is in no order for
/// it.
const uint64_t* values_of_warp(uint64_t mine, const void* pc);
int threads_of_block();
KernelThread& thread_of_block(int number);
/// Everything that waits, for what is asynchronous to choose from.
void each_parked(const std::function<void(KernelThread&, Condition&)>& visit);

// ---- clocks.cpp, async.cpp

void begin_async_block(int threads);
/// Something that a thread waits for, or that the seed chooses, is over now. False if nothing is.
bool complete_late();
bool complete_seeded(uint64_t random);
/// All threads of the block have ended.
void end_async_block(bool stuck);
/// Joins the clocks of all threads at a barrier of the block, or of lanes that came together.
void join_clocks(KernelThread* const* threads, size_t count);
/// An access to dynamic shared memory, by what is asynchronous and not over.
extern bool async_used;
void check_async(size_t offset, size_t bytes, bool write, const void* pc);
/// An access to what may be registers of wgmma.
void check_registers(const void* address, size_t bytes, bool write, const void* pc);
extern bool clocks_used;
/// Are accesses of threads seen? Else only those of what is asynchronous are checked.
extern bool accesses_seen;
/// Does `seen` know that a thread's access with these stamps is over?
bool covers(const Clocks* seen, int thread, uint16_t clock, uint32_t releases);

/// Does a test leave out this call of a kernel?
inline bool left_out(const char* call, const void* place) {
  return options.leaves_out != nullptr && options.leaves_out(call, place);
}

/// What a block may ask for on a device of compute capability 9.0.
inline constexpr size_t kMaxDynamicBytes = size_t{227} << 10;

}  // namespace usp::emulator
