/// When what is asynchronous is over, as Options::completion says, and what threads may not do
/// before.

#include "async.h"

#include <algorithm>

namespace usp::emulator {

bool async_used = false, accesses_seen = false;
std::vector<Chunk> chunks;

char* shared_begin() { return static_cast<char*>(dynamic_shared_memory()); }

void use_async() {
  if (async_used) return;
  async_used = true;
  chunks.assign(kMaxDynamicBytes / kChunk, {});
}

/// The offset in dynamic shared memory; a problem and false if it does not lie there.
bool in_dynamic(const void* address, size_t bytes, size_t* offset, const void* pc) {
  *offset = static_cast<const char*>(address) - shared_begin();
  if (*offset <= kMaxDynamicBytes && bytes <= kMaxDynamicBytes - *offset) return true;
  problem("out of bounds", "an asynchronous operation names what is not dynamic shared memory", pc);
  return false;
}

/// Address where 16-byte pieces are swizzled: bits 4 to 6 are changed by bits 7 to 9.
uint32_t swizzled(uint32_t address, int bytes) {
  const uint32_t mask = bytes / 16 - 1;  // 128: 7, 64: 3, 32: 1
  return bytes == 0 ? address : address ^ (address >> 7 & mask) << 4;
}

/// May the running thread, or whoever knows `seen`, touch the chunk?
void check_chunk(const Chunk& chunk, bool write, const Clocks* seen, const char* who,
                 const void* pc) {
  if (chunk.barrier != 0 &&
      (chunk.flight || knows(seen, layout.barriers + chunk.barrier - 1) <= chunk.phase)) {
    problem("race",
            std::string(who) + (write ? " overwrites" : " reads") +
                " what a copy brings, without a wait for phase " + std::to_string(chunk.phase) +
                " of " + place(barriers[chunk.barrier - 1]),
            pc);
  }
  if (chunk.copy != 0) {
    problem("race", std::string(who) + " uses what a cp.async brings, without cp_async_wait", pc);
  }
  if (!write) return;
  for (size_t i = 0; i < warpgroups.size(); ++i) {
    if (chunk.group[i] > knows(seen, layout.groups + static_cast<int>(i))) {
      problem("race",
              std::string(who) + " overwrites what group " + std::to_string(chunk.group[i]) +
                  " of wgmma of warpgroup " + std::to_string(i) +
                  " reads, without its wgmma_wait and a barrier between",
              pc);
    }
  }
  if (chunk.store != 0 && chunk.store_group > knows(seen, layout.stores + chunk.store - 1)) {
    problem("race",
            std::string(who) +
                " overwrites what a tma_store reads, without its wait and a "
                "barrier between",
            pc);
  }
}

void begin_async_block(int threads) {
  async_used = false;
  begin_clocks(threads);
  begin_barriers(threads);
  begin_copies(threads);
  begin_products(threads);
}

bool complete_late() {
  bool done = false;
  std::vector<std::pair<BarrierState*, ProductsOver*>> wanted;
  each_parked([&](KernelThread&, Condition& condition) {
    if (auto* products = dynamic_cast<ProductsOver*>(&condition)) {
      if (wanted.empty() || wanted.back().second != products) wanted.push_back({nullptr, products});
    } else if (auto* phase = dynamic_cast<PhaseOver*>(&condition)) {
      wanted.push_back({phase->barrier, nullptr});
    }
  });
  for (const auto& [barrier, products] : wanted) {
    if (products != nullptr) {
      while (!products->over() && can_execute(*products->group)) {
        execute(*products->group);
        done = true;
      }
    } else if (!done) {
      for (size_t i = copies.size(); i-- > 0;) {  // the last first
        if (copies[i]->barrier != barrier) continue;
        finish(i);
        return true;
      }
    }
  }
  return done;
}

bool complete_seeded(uint64_t random) {
  bool done = false;
  const uint64_t choice = random >> 8;
  if (random % 4 == 0 && !copies.empty()) {
    const size_t i = choice % copies.size();
    if (copies[i]->barrier != nullptr) {
      finish(i);
      done = true;
    }
  }
  if (random / 4 % 4 == 0) {
    Warpgroup* group = warpgroups.empty() ? nullptr : &warpgroups[choice % warpgroups.size()];
    if (group != nullptr && can_execute(*group)) {
      execute(*group);
      done = true;
    }
  }
  return done;
}

void end_async_block(bool stuck) {
  if (!async_used || stuck) return;  // what else is wrong then follows
  end_copies();
  end_barriers();
  end_products();
}

void check_async(size_t offset, size_t bytes, bool write, const void* pc) {
  for (size_t i = offset / kChunk; i <= (offset + bytes - 1) / kChunk; ++i) {
    const Chunk& chunk = chunks[i];
    check_chunk(chunk, write, current->seen, "a thread", pc);
    if (chunk.is_barrier) problem("barrier", "is touched like other memory", pc);
  }
}

uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - shared_begin()) + kSharedBegin;
}

}  // namespace usp::emulator
