/// Who knows what is over: joined wherever threads of a block meet, and by what is asynchronous.

#include <algorithm>

#include "async.h"

namespace usp::emulator {

bool clocks_used = false;
Layout layout;

namespace {

std::deque<Clocks> known;  // of the block

/// What was joined last: threads that know the same learn the same.
struct Joined {
  const Clocks *a, *b, *result;
};
std::array<Joined, 8> joined_last;
unsigned joined_next = 0;

struct Advanced {
  const Clocks *from, *result;
  int index;
  uint32_t value;
};
std::array<Advanced, 8> advanced_last;
unsigned advanced_next = 0;

/// Clocks of warps begin anew at each barrier of the block.
void begin_epoch_of(Clocks& clocks) {
  if (clocks.epoch == current_epoch()) return;
  std::fill(clocks.of.begin() + layout.warps, clocks.of.begin() + layout.barriers, 0u);
  clocks.epoch = current_epoch();
}

}  // namespace

Clocks* new_clocks(const Clocks* from) {
  known.push_back(from != nullptr ? *from
                                  : Clocks{std::vector<uint32_t>(layout.size), current_epoch()});
  return &known.back();
}

void join_into(Clocks& to, const Clocks& from) {
  uint32_t* a = to.of.data();
  const uint32_t* b = from.of.data();
  const auto join_part = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) a[i] = std::max(a[i], b[i]);
  };
  join_part(0, layout.warps);
  join_part(layout.barriers, layout.size);
  if (to.epoch < from.epoch) {
    std::copy(b + layout.warps, b + layout.barriers, a + layout.warps);
    to.epoch = from.epoch;
  } else if (to.epoch == from.epoch) {
    join_part(layout.warps, layout.barriers);
  }
}

const Clocks* join(const Clocks* a, const Clocks* b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  for (const Joined& last : joined_last) {
    if (last.a == a && last.b == b) return last.result;
  }
  Clocks* result = new_clocks(a);
  join_into(*result, *b);
  joined_last[joined_next++ % joined_last.size()] = {a, b, result};
  return result;
}

const Clocks* advance(const Clocks* from, int index, uint32_t value) {
  if (from != nullptr && from->of[index] >= value) return from;
  for (const Advanced& last : advanced_last) {
    if (last.result != nullptr && last.from == from && last.index == index && last.value == value)
      return last.result;
  }
  Clocks* result = new_clocks(from);
  result->of[index] = value;
  advanced_last[advanced_next++ % advanced_last.size()] = {from, result, index, value};
  return result;
}

uint32_t knows(const Clocks* seen, int index) { return seen == nullptr ? 0 : seen->of[index]; }

void Message::add(KernelThread& thread) {
  if (told == nullptr) told = new_clocks(nullptr);
  begin_epoch_of(*told);
  if (thread.seen != nullptr && thread.seen != last) {
    join_into(*told, *thread.seen);
    last = thread.seen;
  }
  told->of[layout.threads + thread.number] = ++thread.releases;
  uint32_t& clock = told->of[layout.warps + thread.number / kWarp];
  clock = std::max<uint32_t>(clock, thread.clock);
}

bool covers(const Clocks* seen, int thread, uint16_t clock, uint32_t releases) {
  if (seen == nullptr) return false;
  return seen->of[layout.threads + thread] > releases ||
         (seen->epoch == current_epoch() && seen->of[layout.warps + thread / kWarp] > clock);
}

void join_clocks(KernelThread* const* threads, size_t count) {
  const Clocks* all = nullptr;
  for (size_t i = 0; i < count; ++i) all = join(all, threads[i]->seen);
  for (size_t i = 0; i < count; ++i) threads[i]->seen = all;
}

void begin_clocks(int threads) {
  clocks_used = false;
  layout.threads = 0;
  layout.warps = threads;
  layout.barriers = layout.warps + (threads + kWarp - 1) / kWarp;
  layout.groups = layout.barriers + kBarriers;
  layout.stores = layout.groups + kWarpgroups;
  layout.size = layout.stores + threads;
  known.clear();
  joined_last = {};
  advanced_last = {};
}

}  // namespace usp::emulator
