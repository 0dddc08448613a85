/// Copies of boxes of a tensor (TMA), and cp.async.

#include <algorithm>

#include "async.h"

namespace usp::emulator {

std::deque<std::unique_ptr<Copy>> copies;

namespace {

constexpr uint64_t kMagic = 0x75737074656e736f;  // of maps that were encoded
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

/// A cp.async that is not over.
struct CpAsync {
  char* to;
  const char* from;
  int bytes;
  uint32_t group;
  const void* pc;
};

/// Copies and groups of each thread.
struct Groups {
  std::vector<CpAsync> copies;
  uint32_t copy_groups = 0;
  uint32_t store_groups = 0;
};
std::vector<Groups> groups;
uint32_t copy_number = 0;

Groups& mine() { return groups[current->number]; }

/// Calls use(shared address, bytes, global address or nullptr) for each 16 bytes of the box.
template <class F>
void each_place(const Copy& copy, F use) {
  const Map& map = copy.map;
  const int width = map.box[0] * map.bytes;
  const uint32_t begin = shared_address(copy.shared);
  for (uint32_t line = 0; line < map.box[1] * map.box[2]; ++line) {
    for (int x = 0; x < width; x += kChunk) {
      use(shared_begin() + (swizzled(begin + line * width + x, map.swizzle) - kSharedBegin),
          static_cast<int>(line), x);
    }
  }
}

template <class F>
void each_piece(const Copy& copy, F use) {
  const Map& map = copy.map;
  const int width = map.box[0] * map.bytes;
  const uint32_t begin = shared_address(copy.shared);
  uint32_t line = 0;
  for (uint32_t z = 0; z < map.box[2]; ++z) {
    for (uint32_t y = 0; y < map.box[1]; ++y, ++line) {
      const int64_t row = int64_t{copy.at[1]} + y, plane = int64_t{copy.at[2]} + z;
      const bool inside = row >= 0 && row < static_cast<int64_t>(map.sizes[1]) && plane >= 0 &&
                          plane < static_cast<int64_t>(map.sizes[2]);
      for (int x = 0; x < width; x += kChunk) {
        char* const shared =
            shared_begin() + (swizzled(begin + line * width + x, map.swizzle) - kSharedBegin);
        const int64_t first = int64_t{copy.at[0]} + x / map.bytes;
        int64_t low = std::max<int64_t>(0, -first);
        int64_t high =
            std::min<int64_t>(kChunk / map.bytes, static_cast<int64_t>(map.sizes[0]) - first);
        if (!inside || high <= low) low = high = 0;
        char* const global = map.address + plane * static_cast<int64_t>(map.strides[1]) +
                             row * static_cast<int64_t>(map.strides[0]) + (first + low) * map.bytes;
        use(shared, static_cast<int>(low * map.bytes), static_cast<int>((high - low) * map.bytes),
            global);
      }
    }
  }
}

size_t box_bytes(const Map& map) {
  return size_t{map.box[0]} * map.box[1] * map.box[2] * map.bytes;
}

void carry_out(Copy& copy) {
  if (copy.barrier == nullptr) {
    each_piece(copy, [&](char* shared, int low, int bytes, char* global) {
      if (bytes == 0) return;
      std::memcpy(global, shared + low, bytes);
    });
    copy.read = true;
    return;
  }
  BarrierState& barrier = *copy.barrier;
  each_piece(copy, [&](char* shared, int low, int bytes, char* global) {
    std::memset(shared, 0, kChunk);
    if (bytes > 0) std::memcpy(shared + low, global, bytes);
    chunks[(shared - shared_begin()) / kChunk].flight = false;
  });
  const int64_t bytes = static_cast<int64_t>(box_bytes(copy.map));
  if (barrier.phase != copy.phase) {
    problem("barrier",
            "the phase of " + place(barrier) +
                " was over before the bytes of this copy came: too "
                "few are expected",
            copy.pc);
  }
  barrier.bytes -= bytes;
  barrier.in_flight -= static_cast<int>(bytes);
  if (copy.message.told != nullptr) {
    if (barrier.message.told == nullptr) barrier.message.told = new_clocks(nullptr);
    join_into(*barrier.message.told, *copy.message.told);
  }
  complete_phases(barrier);
}

/// The map, or nullptr and a problem.
const Map* map_of(const CUtensorMap* raw, const void* pc) {
  const Map* map = reinterpret_cast<const Map*>(raw);
  if (map->magic == kMagic) return map;
  problem("tensor map", "cuTensorMapEncodeTiled did not make it", pc);
  return nullptr;
}

std::unique_ptr<Copy> new_copy(const CUtensorMap* raw, const void* shared, int x, int y, int z,
                               const void* pc) {
  const Map* map = map_of(raw, pc);
  size_t offset;
  if (map == nullptr || !in_dynamic(shared, box_bytes(*map), &offset, pc)) end_kernel();
  if (reinterpret_cast<uintptr_t>(shared) % 128 != 0) {
    problem("misaligned", "a copy needs shared memory at a multiple of 128 bytes", pc);
    end_kernel();
  }
  auto copy = std::make_unique<Copy>();
  copy->map = *map;
  copy->shared = const_cast<char*>(static_cast<const char*>(shared));
  copy->at[0] = x, copy->at[1] = y, copy->at[2] = z;
  copy->barrier = nullptr;
  copy->thread = current->number;
  copy->pc = pc;
  return copy;
}

void bring(const CpAsync& copy) {
  std::memset(copy.to, 0, kChunk);
  std::memcpy(copy.to, copy.from, copy.bytes);
}

/// What the copy will read or write there counts from now on.
void touch_global(const Copy& copy, bool write) {
  if (options.counters) {
    Counters& counters = counters_of(copy.pc);
    ++counters.boxes;
    counters.box_bytes += static_cast<int64_t>(box_bytes(copy.map));
  }
  if (!options.checks) return;
  each_piece(copy, [&](char*, int, int bytes, char* global) {
    if (bytes > 0) check_copy(global, bytes, write, copy.pc);
  });
}

}  // namespace

void finish(size_t index) {
  const std::unique_ptr<Copy> copy = std::move(copies[index]);
  copies.erase(copies.begin() + static_cast<ptrdiff_t>(index));
  carry_out(*copy);
}

void begin_copies(int threads) {
  copies.clear();
  groups.assign(threads, {});
}

void end_copies() {
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i]->barrier != nullptr) {
      problem("in flight", "the block ends before this copy is over", copies[i]->pc);
    } else {
      problem("in flight", "the block ends without a wait until this copy has read shared memory",
              copies[i]->pc);
    }
  }
  while (!copies.empty()) {
    if (copies.front()->read) {
      copies.pop_front();
    } else {
      finish(0);
    }
  }
}

void tma_load(void* to, const CUtensorMap* raw, void* address, int x, int y, int z) {
  USP_HERE;
  use_async();
  std::unique_ptr<Copy> copy = new_copy(raw, to, x, y, z, pc);
  BarrierState& barrier = *find_barrier(address, pc);
  if (thread_of_block(barrier.maker).barriers_fenced <= barrier.made_at) {
    problem("proxy", "a copy uses " + place(barrier) + " without fence_barrier_init after its init",
            pc);
  }
  copy->barrier = &barrier;
  copy->phase = barrier.phase;
  const std::vector<const Clocks*> seen{current->seen};
  bool barrier_hit = false;
  const uint32_t number = ++copy_number;
  each_place(*copy, [&](char* shared, int line, int x) {
    const size_t offset = shared - shared_begin();
    Chunk& chunk = chunks[offset / kChunk];
    check_chunk(chunk, true, current->seen, "a copy", pc);
    if (accesses_seen) check_proxy(shared, kChunk, true, seen, -1, current->number, pc);
    barrier_hit |= chunk.is_barrier;
    chunk = {};
    chunk.barrier = static_cast<uint16_t>(1 + barrier.index);
    chunk.phase = barrier.phase;
    chunk.flight = true;
    chunk.swizzle = static_cast<uint8_t>(copy->map.swizzle);
    chunk.number = number;
    chunk.line = line;
    chunk.byte = x;
    mark_written(shared, kChunk, false);
    std::memset(shared, 0xff, kChunk);
  });
  touch_global(*copy, false);
  if (barrier_hit) problem("barrier", "lies where a copy writes", pc);
  copy->message.add(*current);
  barrier.in_flight += static_cast<int>(box_bytes(copy->map));
  copies.push_back(std::move(copy));
  if (options.completion == Completion::at_once) finish(copies.size() - 1);
}

void tma_store(const CUtensorMap* raw, const void* from, int x, int y) {
  USP_HERE;
  use_async();
  clocks_used = true;
  std::unique_ptr<Copy> copy = new_copy(raw, from, x, y, 0, pc);
  copy->group = mine().store_groups + 1;
  const std::vector<const Clocks*> seen{current->seen};
  each_piece(*copy, [&](char* shared, int, int, char*) {
    Chunk& chunk = chunks[(shared - shared_begin()) / kChunk];
    check_chunk(chunk, false, current->seen, "a store", pc);
    chunk.store = static_cast<uint16_t>(1 + current->number);
    chunk.store_group = copy->group;
    if (accesses_seen && chunk.barrier == 0)
      check_proxy(shared, kChunk, false, seen, -1, current->number, pc);
  });
  touch_global(*copy, true);
  copies.push_back(std::move(copy));
  if (options.completion == Completion::at_once) carry_out(*copies.back());
}

void tma_store_commit() {
  USP_ORDERS();
  ++mine().store_groups;
}

void tma_store_wait_read(int pending) {
  USP_ORDERS();
  Groups& state = mine();
  if (state.store_groups <= static_cast<uint32_t>(pending)) return;
  const uint32_t end = state.store_groups - pending;
  for (size_t i = 0; i < copies.size();) {
    if (copies[i]->barrier == nullptr && copies[i]->thread == current->number &&
        copies[i]->group <= end) {
      if (!copies[i]->read) carry_out(*copies[i]);
      copies.erase(copies.begin() + static_cast<ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  current->seen = advance(current->seen, layout.stores + current->number, end);
}

void cp_async(void* to, const void* from, int bytes) {
  USP_HERE;
  use_async();
  size_t offset;
  if (!in_dynamic(to, kChunk, &offset, pc)) end_kernel();
  if (bytes < 0 || bytes > kChunk || (reinterpret_cast<uintptr_t>(from) | offset) % kChunk != 0) {
    problem("misaligned", "cp.async takes 16 bytes from and to multiples of 16", pc);
    end_kernel();
  }
  if (accesses_seen) {
    if (bytes > 0) check_copy(from, bytes, false, pc);
    check_access(to, kChunk, true, false, pc);
  }
  if (options.counters) {
    // Two requests, so of a place each, both in the line that calls.
    const void* const before = static_cast<const char*>(pc) - 1;
    current->log->push_back({before, from, static_cast<uint32_t>(bytes), false, false, false});
    current->log->push_back({pc, to, kChunk, true, true, false});
  }
  chunks[offset / kChunk].copy = static_cast<uint16_t>(1 + current->number);
  mine().copies.push_back(
      {static_cast<char*>(to), static_cast<const char*>(from), bytes, mine().copy_groups + 1, pc});
  std::memset(to, 0xff, kChunk);
  if (options.completion == Completion::at_once) bring(mine().copies.back());
}

void cp_async_commit() {
  USP_ORDERS();
  ++mine().copy_groups;
}

void cp_async_wait(int pending) {
  USP_ORDERS();
  Groups& state = mine();
  if (state.copy_groups <= static_cast<uint32_t>(pending)) return;
  const uint32_t end = state.copy_groups - pending;
  std::erase_if(state.copies, [&](const CpAsync& copy) {
    if (copy.group > end) return false;
    bring(copy);
    chunks[(copy.to - shared_begin()) / kChunk].copy = 0;
    mark_written(copy.to, kChunk, true);
    return true;
  });
}

}  // namespace usp::emulator

using namespace usp::emulator;

CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  constexpr uint16_t kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2}, kSwizzles[] = {0, 32, 64, 128};
  Map map{};
  map.magic = kMagic;
  map.address = static_cast<char*>(address);
  map.bytes = kBytes[type];
  map.swizzle = kSwizzles[swizzle];
  map.rank = static_cast<uint16_t>(rank);
  map.fill = static_cast<uint16_t>(fill);
  if (rank < 2 || rank > 3 || reinterpret_cast<uintptr_t>(address) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(out) % 64 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (uint32_t i = 0; i < 3; ++i) {
    map.sizes[i] = i < rank ? sizes[i] : 1;
    map.box[i] = i < rank ? box[i] : 1;
    if (map.sizes[i] == 0 || map.sizes[i] > uint64_t{1} << 32 || map.box[i] == 0 ||
        map.box[i] > 256 || (i < rank && element_strides[i] != 1)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  uint64_t extent = map.sizes[0] * map.bytes;
  for (uint32_t i = 0; i + 1 < rank; ++i) {
    map.strides[i] = strides[i];
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40 || strides[i] < extent)
      return CUDA_ERROR_INVALID_VALUE;
    extent += strides[i] * (map.sizes[i + 1] - 1);
  }
  const uint32_t inner = map.box[0] * map.bytes;
  if (inner % 16 != 0 || (map.swizzle != 0 && inner > map.swizzle)) return CUDA_ERROR_INVALID_VALUE;
  if (!is_allocated(address, extent)) return CUDA_ERROR_INVALID_VALUE;  // a GPU faults later
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}
