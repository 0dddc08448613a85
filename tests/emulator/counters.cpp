/// What a warp's accesses cost on a GPU: sectors of global memory, wavefronts of shared memory.

#include <algorithm>
#include <array>

#include "internal.h"

namespace usp::emulator {
namespace {

constexpr int kWarp = 32, kBanks = 32, kWordBytes = 4, kSectorBytes = 32;
constexpr int kWavefrontBytes = kBanks * kWordBytes;

uint64_t number(const Event& event) { return reinterpret_cast<uintptr_t>(event.address); }

template <size_t N>
int distinct(std::array<uint64_t, N>& values, int count) {
  std::sort(values.begin(), values.begin() + count);
  return static_cast<int>(std::unique(values.begin(), values.begin() + count) - values.begin());
}

/// Different 32-byte sectors that a request touches.
int sectors(const std::vector<Event>& group) {
  std::array<uint64_t, 4 * kWarp> touched;
  int count = 0;
  for (const Event& event : group) {
    if (event.bytes == 0) continue;  // of a cp.async that writes zeros alone
    const uint64_t last = (number(event) + event.bytes - 1) / kSectorBytes;
    for (uint64_t sector = number(event) / kSectorBytes; sector <= last; ++sector) {
      if (count < static_cast<int>(touched.size())) touched[count++] = sector;
    }
  }
  return distinct(touched, count);
}

/// Wavefronts that a request needs beyond those that its bytes need. A wavefront reads one word
/// from each bank; wide accesses go by half or quarter warps.
int bank_conflicts(const std::vector<Event>& group) {
  const int lanes = std::clamp<int>(kWavefrontBytes / std::max(group[0].bytes, 4u), 1, kWarp);
  int conflicts = 0;
  for (size_t first = 0; first < group.size(); first += lanes) {
    std::array<uint64_t, 4 * kWarp> words;
    int count = 0;
    for (size_t i = first; i < std::min(first + lanes, group.size()); ++i) {
      const uint64_t last = (number(group[i]) + group[i].bytes - 1) / kWordBytes;
      for (uint64_t word = number(group[i]) / kWordBytes; word <= last; ++word) {
        if (count < static_cast<int>(words.size())) words[count++] = word;
      }
    }
    std::array<int, kBanks> in_bank{};
    for (int i = 0, n = distinct(words, count); i < n; ++i) ++in_bank[words[i] % kBanks];
    conflicts += *std::max_element(in_bank.begin(), in_bank.end()) - 1;
  }
  return conflicts;
}

/// The most lanes that update the same address, one after another.
int atomic_steps(const std::vector<Event>& group) {
  int most = 0;
  for (const Event& event : group) {
    const auto same = [&](const Event& other) { return other.address == event.address; };
    most = std::max<int>(most, std::count_if(group.begin(), group.end(), same));
  }
  return most;
}

void count(const std::vector<Event>& group) {
  Counters now;
  const Event& first = group[0];
  if (first.atomic) {
    now.atomic_requests = 1;
    now.atomic_steps = atomic_steps(group);
  } else if (first.shared) {
    now.shared_requests = 1;
    now.bank_conflicts = bank_conflicts(group);
  } else {
    (first.write ? now.store_requests : now.load_requests) = 1;
    (first.write ? now.store_sectors : now.load_sectors) = sectors(group);
  }
  counters_of(first.pc) += now;
}

}  // namespace

Counters& Counters::operator+=(const Counters& other) {
  load_requests += other.load_requests, load_sectors += other.load_sectors;
  store_requests += other.store_requests, store_sectors += other.store_sectors;
  shared_requests += other.shared_requests, bank_conflicts += other.bank_conflicts;
  atomic_requests += other.atomic_requests, atomic_steps += other.atomic_steps;
  divergent_branches += other.divergent_branches;
  barriers += other.barriers;
  boxes += other.boxes, box_bytes += other.box_bytes;
  product_flops += other.product_flops;
  exponentials += other.exponentials;
  return *this;
}

void replay(std::vector<Event>* logs, int lanes, unsigned over) {
  std::array<size_t, kWarp> at{};
  std::vector<Event> group;
  std::vector<int> together;
  for (;;) {
    // The lanes at the lowest address of code go on together; others wait for them to catch up, and
    // so do those that are where all meet.
    const void *lowest = nullptr, *meeting = nullptr;
    bool missing = false;
    for (int lane = 0; lane < lanes; ++lane) {
      if (at[lane] + 1 >= logs[lane].size()) missing |= !(over >> lane & 1);  // or still there
      if (at[lane] == logs[lane].size()) continue;
      const Event& event = logs[lane][at[lane]];
      const void*& first = event.meets ? meeting : lowest;
      if (first == nullptr || event.pc < first) first = event.pc;
    }
    if (lowest == nullptr && !missing) lowest = meeting;
    if (lowest == nullptr) break;
    group.clear();
    together.clear();
    for (int lane = 0; lane < lanes; ++lane) {
      if (at[lane] == logs[lane].size() || logs[lane][at[lane]].pc != lowest) continue;
      group.push_back(logs[lane][at[lane]++]);
      together.push_back(lane);
    }
    if (group[0].address != nullptr) count(group);
    const auto next = [&](int lane) {
      return at[lane] == logs[lane].size() ? nullptr : logs[lane][at[lane]].pc;
    };
    const auto parts = [&](int lane) { return next(lane) != next(together[0]); };
    if (std::any_of(together.begin(), together.end(), parts)) {
      ++counters_of(lowest).divergent_branches;
    }
  }
  for (int lane = 0; lane < lanes; ++lane) {
    logs[lane].erase(logs[lane].begin(), logs[lane].begin() + static_cast<ptrdiff_t>(at[lane]));
  }
}

}  // namespace usp::emulator
