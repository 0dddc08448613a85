/// Kernels: a fiber for each thread of a block. Blocks run one after another, threads take turns
/// wherever they wait for each other.

#include "threads.h"

#include <sys/mman.h>

#include <algorithm>
#include <boost/context/fiber.hpp>
#include <memory>
#include <numeric>
#include <random>

#include "internal.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// USP_INLINE: no processor foresees where a call returns to that began on another stack. So between
// a kernel and the jump there are as few as can be.

namespace usp::emulator {

thread_local KernelThread* current = nullptr;

namespace {

namespace context = boost::context;
constexpr size_t kStackBytes = size_t{64} << 10, kPageBytes = 4096;
constexpr int kWarp = 32;

/// Stacks with an inaccessible page below each, so that one that overflows dies. The lanes of a
/// warp take turns: were their stacks whole pages apart, they would share a few sets of the cache.
struct GuardedStacks {
  void* memory;   // of make()
  size_t unused;  // at the top

  GuardedStacks(void* stack, int lane) : memory(stack), unused(lane * kPageBytes / kWarp) {}

  static void* make() {
    void* memory = mmap(nullptr, kPageBytes + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(memory, kPageBytes, PROT_NONE);
    return memory;
  }
  context::stack_context allocate() const {
    context::stack_context stack;
    stack.size = kStackBytes - unused;
    stack.sp = static_cast<char*>(memory) + kPageBytes + stack.size;
    return stack;
  }
  void deallocate(context::stack_context&) const { munmap(memory, kPageBytes + kStackBytes); }
};

enum class State { ready, barrier, exchange, parked, finished, faulted };

struct Fiber : KernelThread {
  State state = State::finished;
  unsigned mask = 0;               // of the lanes it waits for
  uint64_t value = 0;              // what it gives them
  bool orders = true;              // what they did before is before what they do then
  const void* pc = nullptr;        // where it waits
  Condition* condition = nullptr;  // while it is parked
  Fiber* next = nullptr;           // of its warp, in the order in which they take turns
  void* stack = nullptr;
  context::fiber context;
};

struct Warp {
  std::vector<Fiber*> lanes;
  Fiber* first = nullptr;  // to take its turn
  std::vector<Event> logs[kWarp];
  uint64_t exchanged[kWarp];
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;  // reused by later blocks and launches
  std::vector<void*> stacks;                   // of fibers that were stuck
  std::vector<Warp> warps;
  context::fiber scheduler;
  context::fiber* left;  // where who gave up its turn last will go on
  void (*call)(const void*);
  bool faulted;
  int parked = 0;    // threads that wait for conditions
  bool ran = false;  // a thread had a turn
  int count = 0;     // of threads
  bool stuck = false;
};

Block& block() {
  static Block* block = new Block;  // never unwinds a fiber that is stuck
  return *block;
}

alignas(64) char parameters[4096];  // of the launch, not on the heap, which a device cannot reach
alignas(1024) char dynamic_memory[kMaxDynamicBytes];

Order order_of_threads;

std::vector<int> ordered(int count, std::mt19937_64& random) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (order_of_threads == Order::reverse) std::reverse(order.begin(), order.end());
  if (order_of_threads == Order::shuffled) std::shuffle(order.begin(), order.end(), random);
  return order;
}

/// Goes on at `to`; returns when someone goes on at `here`.
USP_INLINE void jump(context::fiber& here, context::fiber& to) {
  block().left = &here;
  context::fiber from = std::move(to).resume();
  *block().left = std::move(from);
}

void take_turn(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
}

/// The first that is ready of a lane and those after it; nullptr if none is.
Fiber* find_ready(Fiber* lane) {
  while (lane != nullptr && lane->state != State::ready) lane = lane->next;
  return lane;
}

/// Ends the turn of a thread that waits or is over. The next lane goes on without the scheduler
/// between, since turns are most of what a kernel's run takes.
USP_INLINE void give_turn(Fiber& self) {
  Fiber* next = block().faulted ? nullptr : find_ready(self.next);
  if (next != nullptr) take_turn(*next);
  jump(self.context, next != nullptr ? next->context : block().scheduler);
}

/// Called by a thread: lets others run until someone makes it ready again.
USP_INLINE void wait(State state, const void* pc) {
  Fiber& self = static_cast<Fiber&>(*current);
  self.state = state;
  self.pc = pc;
  give_turn(self);
}

void make_fiber(std::unique_ptr<Fiber>& slot, int lane) {
  slot = std::make_unique<Fiber>();
  Fiber* self = slot.get();
  std::vector<void*>& stacks = block().stacks;
  if (stacks.empty()) stacks.push_back(GuardedStacks::make());
  self->stack = stacks.back();
  stacks.pop_back();
  const GuardedStacks stack(self->stack, lane);
  self->context = context::fiber(std::allocator_arg, stack, [self](context::fiber&& from) {
    *block().left = std::move(from);
    self->stack_end = __builtin_frame_address(0);  // what the kernel calls lies below
    for (;;) {
      block().call(parameters);
      self->state = State::finished;
      give_turn(*self);
    }
    return context::fiber{};
  });
}

/// What is stuck never goes on: nothing unwinds it, and its stack is another's.
void abandon(std::unique_ptr<Fiber>& slot) {
  block().stacks.push_back(slot->stack);
  static_cast<void>(slot.release());
}

/// Lets those lanes go on whose groups are complete.
bool release_groups(Warp& warp) {
  bool released = false;
  for (Fiber* lane : warp.lanes) {
    if (lane->state != State::exchange) continue;
    unsigned there = 0;
    for (const Fiber* other : warp.lanes) {
      if (other->state == State::exchange && other->mask == lane->mask) there |= 1u << other->lane;
    }
    if (lane->mask & ~there) continue;
    const unsigned mask = lane->mask;
    uint16_t clock = 0;
    for (Fiber* other : warp.lanes) {
      if (mask >> other->lane & 1) clock = std::max(clock, other->clock);
    }
    for (Fiber* other : warp.lanes) {
      if (!(mask >> other->lane & 1)) continue;
      warp.exchanged[other->lane] = other->value;
      if (lane->orders) other->clock = clock + 1;
      other->state = State::ready;
    }
    if (clocks_used && lane->orders) {
      KernelThread* together[kWarp];
      size_t count = 0;
      for (Fiber* other : warp.lanes) {
        if (mask >> other->lane & 1) together[count++] = other;
      }
      join_clocks(together, count);
    }
    released = true;
  }
  return released;
}

/// Lets those lanes go on whose conditions hold.
void release_parked(Warp& warp) {
  for (Fiber* lane : warp.lanes) {
    if (lane->state != State::parked || !lane->condition->over()) continue;
    lane->state = State::ready;
    --block().parked;
  }
}

/// Runs the lanes of a warp until each of them ended or waits for another warp.
void run(Warp& warp) {
  if (block().parked > 0) release_parked(warp);
  do {
    if (Fiber* lane = find_ready(warp.first)) {
      block().ran = true;
      take_turn(*lane);
      jump(block().scheduler, lane->context);
      current = nullptr;
      if (block().faulted) return;
    }
    if (options.counters) {
      unsigned over = 0;
      for (const Fiber* lane : warp.lanes) over |= (lane->state == State::finished) << lane->lane;
      replay(warp.logs, static_cast<int>(warp.lanes.size()), over);
    }
  } while (release_groups(warp));
}

void problem_of(Fiber& fiber, const std::string& kind, const std::string& detail) {
  current = &fiber;
  threadIdx = fiber.index;
  problem(kind, detail, fiber.pc);
  current = nullptr;
}

/// All threads wait or have ended. Lets those at a barrier go on, and says if they cannot.
/// False if the block is over.
bool release_barrier(std::vector<Fiber*>& threads) {
  Fiber *waiting = nullptr, *elsewhere = nullptr, *stuck = nullptr;
  size_t finished = 0;
  for (Fiber* thread : threads) {
    if (thread->state == State::finished) ++finished;
    if (thread->state == State::exchange || thread->state == State::parked) stuck = thread;
    if (thread->state != State::barrier) continue;
    if (waiting == nullptr) waiting = thread;
    if (thread->pc != waiting->pc) elsewhere = thread;
  }
  if (finished == threads.size()) return false;
  block().stuck = stuck != nullptr;
  if (stuck != nullptr && stuck->state == State::parked) {
    for (Fiber* thread : threads) {  // each place once
      if (thread->state == State::parked) {
        problem_of(*thread, "deadlock", thread->condition->text());
      }
    }
    return false;
  }
  if (stuck != nullptr) {
    char mask[16];
    std::snprintf(mask, sizeof(mask), "%08x", stuck->mask);
    problem_of(*stuck, "deadlock", std::string("waits for lanes that never come, mask ") + mask);
    return false;
  }
  if (finished > 0) {
    problem_of(*waiting, "divergent barrier",
               std::to_string(finished) + " threads of the block have ended");
  } else if (elsewhere != nullptr) {
    problem_of(*elsewhere, "divergent barrier", "other threads wait at another one");
  }
  if (options.counters) ++counters_of(waiting->pc).barriers;
  begin_epoch();
  for (Fiber* thread : threads) {
    thread->clock = 0;
    if (thread->state == State::barrier) thread->state = State::ready;
  }
  if (clocks_used) {
    std::vector<KernelThread*> all(threads.begin(), threads.end());
    join_clocks(all.data(), all.size());
  }
  return true;
}

void run_block(std::vector<Fiber*>& threads, std::mt19937_64& random) {
  std::vector<Warp>& warps = block().warps;
  for (Fiber* thread : threads) {
    thread->state = State::ready;
    thread->clock = 0;
    thread->releases = thread->barriers_fenced = 0;
    thread->fences.clear();
    thread->seen = nullptr;
    thread->watch_begin = thread->watch_end = nullptr;
  }
  block().parked = 0;
  block().stuck = false;
  block().count = static_cast<int>(threads.size());
  for (Warp& warp : warps) {
    Fiber** next = &warp.first;
    for (int lane : ordered(static_cast<int>(warp.lanes.size()), random)) {
      *next = warp.lanes[lane];
      next = &warp.lanes[lane]->next;
    }
    *next = nullptr;
    for (std::vector<Event>& log : warp.logs) log.clear();
  }
  const std::vector<int> order = ordered(static_cast<int>(warps.size()), random);
  begin_block();
  begin_async_block(static_cast<int>(threads.size()));
  do {
    do {
      block().ran = false;
      for (int warp : order) {
        run(warps[warp]);
        if (block().faulted) return;
        if (async_used && options.completion == Completion::seeded) {
          block().ran |= complete_seeded(random());
        }
      }
    } while (block().parked > 0 && (block().ran || complete_late()));
  } while (release_barrier(threads));
  end_async_block(block().stuck);
}

}  // namespace

void park(Condition& condition, const void* pc) {
  if (condition.over()) return;
  Fiber& self = static_cast<Fiber&>(*current);
  self.condition = &condition;
  ++block().parked;
  wait(State::parked, pc);
}

int threads_of_block() { return block().count; }

KernelThread& thread_of_block(int number) { return *block().fibers[number]; }

void each_parked(const std::function<void(KernelThread&, Condition&)>& visit) {
  for (int i = 0; i < block().count; ++i) {
    Fiber& fiber = *block().fibers[i];
    if (fiber.state == State::parked) visit(fiber, *fiber.condition);
  }
}

void end_kernel() {
  block().faulted = true;
  wait(State::faulted, nullptr);
}

bool kernel_is_running() { return current != nullptr; }

void run(const Launch& launch) {
  const bool checked = launch.instrumented && options.checks;
  if (checked) count_checked(launch);
  if (checked && options.every_order) return run_in_every_order(launch);
  run(launch, options.threads);
}

void run(const Launch& launch, Order order) {
  Block& state = block();
  accesses_seen = launch.instrumented && options.checks;
  const int count = launch.block.x * launch.block.y * launch.block.z;
  state.fibers.resize(std::max<size_t>(state.fibers.size(), count));
  state.call = launch.call;
  state.faulted = false;
  order_of_threads = order;
  std::copy(launch.parameters.begin(), launch.parameters.end(), parameters);
  blockDim = launch.block;
  gridDim = launch.grid;

  std::mt19937_64 random(options.seed);
  const int blocks = launch.grid.x * launch.grid.y * launch.grid.z;
  if (!launch.instrumented) forget_initialised();
  begin_launch(launch, launch.instrumented && options.checks);
  for (int number : ordered(blocks, random)) {
    blockIdx.x = number % gridDim.x;
    blockIdx.y = number / gridDim.x % gridDim.y;
    blockIdx.z = number / gridDim.x / gridDim.y;
    std::vector<Fiber*> threads;
    state.warps.resize((count + kWarp - 1) / kWarp);
    for (Warp& warp : state.warps) warp.lanes.clear();
    for (int i = 0; i < count; ++i) {
      std::unique_ptr<Fiber>& slot = state.fibers[i];
      if (slot != nullptr && slot->state != State::finished) abandon(slot);
      if (slot == nullptr) make_fiber(slot, i % kWarp);
      Warp& warp = state.warps[i / kWarp];
      warp.lanes.push_back(slot.get());
      slot->number = i;
      slot->lane = i % kWarp;
      slot->log = &warp.logs[i % kWarp];
      slot->index.x = i % blockDim.x;
      slot->index.y = i / blockDim.x % blockDim.y;
      slot->index.z = i / blockDim.x / blockDim.y;
      threads.push_back(slot.get());
    }
    run_block(threads, random);
    if (state.faulted) return;
  }
}

void* dynamic_shared_memory() { return dynamic_memory; }

int lane() { return current->lane; }

namespace {

USP_INLINE const uint64_t* exchange(unsigned mask, uint64_t mine, const void* pc,
                                    bool orders = true) {
  Fiber& self = static_cast<Fiber&>(*current);
  if (!(mask >> self.lane & 1)) problem("mask", "names other lanes than the one that calls", pc);
  self.mask = mask | 1u << self.lane;
  self.value = mine;
  self.orders = orders;
  wait(State::exchange, pc);
  return block().warps[self.number / kWarp].exchanged;
}

}  // namespace

uint64_t shuffle_bits(unsigned mask, uint64_t mine, int source) {
  const void* pc = __builtin_return_address(0);
  if (!(mask >> source & 1)) problem("mask", "does not name the lane that is read", pc);
  return exchange(mask, mine, pc)[source];
}

const uint64_t* values_of_warp(uint64_t mine, const void* pc) {
  return exchange(0xffffffff, mine, pc, false);
}

unsigned ballot(unsigned mask, bool predicate) {
  const uint64_t* given = exchange(mask, predicate, __builtin_return_address(0));
  unsigned votes = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if (mask >> lane & 1) votes |= static_cast<unsigned>(given[lane]) << lane;
  }
  return votes;
}

}  // namespace usp::emulator

void __syncthreads() {
  const void* const pc = __builtin_return_address(0);
  if (!usp::emulator::left_out("__syncthreads", pc)) {
    usp::emulator::wait(usp::emulator::State::barrier, pc);
  }
}

void __syncwarp(unsigned mask) {
  const void* const pc = __builtin_return_address(0);
  if (!usp::emulator::left_out("__syncwarp", pc)) usp::emulator::exchange(mask, 0, pc);
}
