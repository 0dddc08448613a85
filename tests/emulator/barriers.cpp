/// Barriers in shared memory (mbarrier), named barriers, fences, and registers that warpgroups hand
/// each other.

#include <algorithm>

#include "async.h"

namespace usp::emulator {

std::deque<BarrierState> barriers;

namespace {

std::array<NamedBarrier, 16> named;
int register_pool = 0;
std::vector<int> registers_of_threads;

struct NamedOver final : Condition {
  NamedBarrier* barrier = nullptr;
  uint32_t generation = 0;
  int number = 0;

  bool over() override { return barrier->generation != generation; }
  std::string text() override {
    return "waits at named barrier " + std::to_string(number) + " with " +
           std::to_string(barrier->arrived) + " of " + std::to_string(barrier->threads) +
           " threads";
  }
};

struct RegistersFree final : Condition {
  int wanted = 0;

  bool over() override {  // takes what it waits for
    if (register_pool < wanted) return false;
    register_pool -= wanted;
    return true;
  }
  std::string text() override { return "waits for registers that no other warpgroup gives up"; }
};

}  // namespace

std::string place(const BarrierState& barrier) {
  return "the barrier at byte " + std::to_string(barrier.address - shared_begin());
}

BarrierState* find_barrier(const void* address, const void* pc) {
  for (BarrierState& barrier : barriers) {
    if (barrier.address != address) continue;
    if (!is_before(barrier.made)) {
      problem("race",
              "uses " + place(barrier) +
                  " which another thread initialises, without a "
                  "__syncthreads between",
              pc);
    }
    return &barrier;
  }
  problem("barrier", "is not initialised", pc);
  end_kernel();
  return nullptr;
}

void complete_phases(BarrierState& barrier) {
  while (barrier.pending == 0 && barrier.bytes == 0) {
    ++barrier.phase;
    if (options.counters) ++counters_of(barrier.pc).barriers;
    barrier.pending = barrier.expected;
    if (barrier.message.told == nullptr) barrier.message.told = new_clocks(nullptr);
    barrier.message.told->of[layout.barriers + barrier.index] = barrier.phase;
    barrier.over = new_clocks(barrier.message.told);
    barrier.message.last = nullptr;
  }
}

std::string PhaseOver::text() {
  std::string text = "waits for phase " + std::to_string(phase) + " of " + place(*barrier) +
                     ", which is in phase " + std::to_string(barrier->phase) + ": " +
                     std::to_string(barrier->pending) + " of " + std::to_string(barrier->expected) +
                     " arrivals";
  if (barrier->bytes > 0) text += " and " + std::to_string(barrier->bytes) + " bytes";
  text += " are missing";
  if (barrier->bytes < 0) {
    text += ", " + std::to_string(-barrier->bytes) + " bytes came that nobody expects";
  }
  return text;
}

void begin_barriers(int threads) {
  barriers.clear();
  named = {};
  register_pool = 0;
  registers_of_threads.assign(threads, std::min(255, 65536 / std::max(threads, 1)) / 8 * 8);
}

void end_barriers() {
  for (const BarrierState& barrier : barriers) {
    if (barrier.bytes == 0) continue;
    problem("barrier",
            "at the end of the block " + place(barrier) +
                (barrier.bytes > 0 ? " still expects " : " got more than it expects by ") +
                std::to_string(std::abs(barrier.bytes)) + " bytes",
            barrier.pc);
  }
}

void barrier_init(void* address, unsigned arrivals) {
  USP_ORDERS();
  use_async();
  clocks_used = true;
  size_t offset;
  if (!in_dynamic(address, 8, &offset, pc)) end_kernel();
  if (arrivals < 1 || arrivals >= 1u << 20) problem("barrier", "counts from 1 to 2^20 - 1", pc);
  if (barriers.size() == kBarriers) problem("barrier", "the emulator has room for 64", pc);
  barriers.push_back({static_cast<char*>(address),
                      static_cast<int>(barriers.size()),
                      arrivals,
                      arrivals,
                      0,
                      0,
                      {},
                      nullptr,
                      access_now(),
                      current->number,
                      current->releases,
                      0,
                      pc});
  chunks[offset / kChunk].is_barrier = true;
}

void barrier_arrive(void* address, unsigned bytes) {
  USP_ORDERS();
  BarrierState& barrier = *find_barrier(address, pc);
  barrier.bytes += bytes;
  barrier.message.add(*current);
  if (barrier.pending == 0) {
    problem("barrier",
            "more threads arrive in a phase of " + place(barrier) + " than the " +
                std::to_string(barrier.expected) + " that it counts",
            pc);
  } else {
    --barrier.pending;
  }
  complete_phases(barrier);
}

bool barrier_wait(void* address, unsigned parity, bool) {
  USP_ORDERS(true);
  BarrierState& barrier = *find_barrier(address, pc);
  if ((barrier.phase & 1) == parity) {
    PhaseOver condition;
    condition.barrier = &barrier;
    condition.phase = barrier.phase;
    park(condition, pc);
    if (barrier.phase > condition.phase + 1) {
      problem("barrier",
              "two phases of " + place(barrier) +
                  " passed while a thread waited for the first: on "
                  "a GPU it may wait on",
              pc);
    }
  }
  current->seen = join(current->seen, barrier.over);
  return true;
}

void fence_barrier_init() {
  USP_ORDERS();
  current->barriers_fenced = ++current->releases;
}

void fence_proxy_async() {
  USP_ORDERS();
  const Access now = access_now();
  current->fences.push_back({now.epoch, now.releases, now.clock});
  current->barriers_fenced = ++current->releases;
}

void named_barrier(int number, int threads, bool wait) {
  USP_ORDERS();
  clocks_used = true;
  if (number < 1 || number > 15 || threads % kWarp != 0) {
    problem("barrier", "a named barrier has a number of 1 to 15 and whole warps", pc);
    end_kernel();
  }
  NamedBarrier& barrier = named[number];
  if (barrier.arrived > 0 && barrier.threads != threads) {
    problem("barrier", "other threads name another count of threads", pc);
  }
  barrier.threads = threads;
  barrier.message.add(*current);
  barrier.warps |= 1u << current->number / kWarp;
  NamedOver condition;
  condition.barrier = &barrier;
  condition.generation = barrier.generation;
  condition.number = number;
  if (++barrier.arrived == threads) {
    if (barrier.generation > 0 && barrier.warps != barrier.warps_before) {
      problem("barrier", "other warps meet at this number than the last time", pc);
    }
    if (options.counters) ++counters_of(pc).barriers;
    barrier.warps_before = barrier.warps;
    barrier.warps = 0;
    barrier.arrived = 0;
    ++barrier.generation;
    barrier.over = new_clocks(barrier.message.told);
    barrier.message = {};
  } else if (wait) {
    park(condition, pc);
  }
  if (wait) current->seen = join(current->seen, barrier.over);
}

void set_registers(int registers, bool more) {
  USP_HERE;
  int& now = registers_of_threads[current->number];
  if (registers < 24 || registers > 256 || registers % 8 != 0) {
    problem("registers", "a multiple of 8 from 24 to 256", pc);
  }
  if (more ? registers < now : registers > now) {
    problem("registers",
            "a thread has " + std::to_string(now) + ", which is not " + (more ? "fewer" : "more") +
                " than " + std::to_string(registers),
            pc);
  }
  RegistersFree condition;
  condition.wanted = registers - now;
  if (condition.wanted > 0) {
    park(condition, pc);
  } else {
    register_pool -= condition.wanted;
  }
  now = registers;
}

}  // namespace usp::emulator
