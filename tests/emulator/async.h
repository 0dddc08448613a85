#pragma once

#include <hopper_device.h>

#include <array>
#include <deque>
#include <memory>

#include "threads.h"

/// What a block has under way beside its threads: barriers in shared memory, copies of tiles,
/// products of warpgroups, and who knows which of them are over.
namespace usp::emulator {

inline constexpr int kWarp = 32, kWarpgroup = 128, kChunk = 16;
inline constexpr uint32_t kSharedBegin = 1024;  // a GPU keeps the first addresses for itself

// Of a call that a kernel makes; of one that orders, which a test may leave out.
#define USP_HERE const void* const pc = __builtin_return_address(0)
#define USP_ORDERS(...) \
  USP_HERE;             \
  if (left_out(__func__, pc)) return __VA_ARGS__

// ---- clocks.cpp

/// Where the parts of Clocks begin.
struct Layout {
  int threads = 0, warps = 0, barriers = 0, groups = 0, stores = 0, size = 0;
};
extern Layout layout;

/// For a block of so many threads.
void begin_clocks(int threads);
/// Lives as long as the block. A copy of `from`, or nothing known.
Clocks* new_clocks(const Clocks* from);
void join_into(Clocks& to, const Clocks& from);
/// What both know.
const Clocks* join(const Clocks* a, const Clocks* b);
/// What `from` knows, and that place `index` has come to `value`.
const Clocks* advance(const Clocks* from, int index, uint32_t value);
uint32_t knows(const Clocks* seen, int index);

/// What those who arrive tell those who wait.
struct Message {
  Clocks* told = nullptr;
  const Clocks* last = nullptr;  // joined already

  /// The thread lets others see what it did.
  void add(KernelThread& thread);
};

// ---- barriers.cpp

struct BarrierState {
  char* address;
  int index;
  unsigned expected, pending;
  int64_t bytes = 0;
  uint32_t phase = 0;
  Message message;
  const Clocks* over = nullptr;  // what the last phase told
  Access made;                   // when it was initialised
  int maker = 0;
  uint32_t made_at = 0;
  int in_flight = 0;  // bytes of copies
  const void* pc = nullptr;
};

/// What the last copy of a tile or product did with 16 bytes of dynamic shared memory.
struct Chunk {
  uint16_t barrier = 0;  // 1 +: the last copy into it tells this one
  uint16_t store = 0;    // 1 +: the thread that last stored it
  uint32_t phase = 0, store_group = 0;
  uint16_t copy = 0;  // 1 +: the thread whose cp.async is in flight
  bool flight = false, is_barrier = false;
  uint8_t swizzle = 0;
  uint32_t number = 0;               // of the copy
  int line = 0, byte = 0;            // of its box
  uint32_t group[kWarpgroups] = {};  // the last group of products that reads it
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  uint32_t generation = 0, warps = 0, warps_before = 0;
  Message message;
  const Clocks* over = nullptr;
};

extern std::deque<BarrierState> barriers;
std::string place(const BarrierState& barrier);
/// The barrier that a thread names; ends the kernel if there is none.
BarrierState* find_barrier(const void* address, const void* pc);
/// Arrivals or bytes have come: goes on to the next phase if they are all there.
void complete_phases(BarrierState& barrier);

struct PhaseOver final : Condition {
  BarrierState* barrier = nullptr;
  uint32_t phase = 0;

  bool over() override { return barrier->phase > phase; }
  std::string text() override;
};

void begin_barriers(int threads);
void end_barriers();

// ---- tensor_copies.cpp

struct Map {
  uint64_t magic;
  char* address;
  uint64_t sizes[3], strides[2];
  uint32_t box[3];
  uint16_t bytes, swizzle, rank, fill;
};

struct Copy {
  Map map;
  char* shared;
  int at[3];
  BarrierState* barrier;  // nullptr: a store
  uint32_t phase = 0;
  Message message;
  int thread = 0;
  uint32_t group = 0;
  bool read = false;
  const void* pc;
};
extern std::deque<std::unique_ptr<Copy>> copies;  // in flight, oldest first
/// The copy is over.
void finish(size_t index);
void begin_copies(int threads);
void end_copies();

// ---- products.cpp

struct Flight {  // accumulators of a warpgroup
  std::array<float*, kWarpgroup> registers{};
  int count = 0, n = 0, users = 0;
  uint32_t last = 0;  // the operation that uses them last, 1 +
  const void* pc = nullptr;
  std::vector<float> values;  // 64 x n
};

struct Product {
  Flight* flight = nullptr;
  uint64_t a = 0, b = 0;
  bool add = false, a_mn = false, b_mn = false, a_registers = false;
  int issued = 0;
  std::array<int, 4> lanes{};
  std::array<std::vector<const Clocks*>, 4> seen;
  std::vector<uint32_t> a_values;  // [thread][4]
  const void* pc = nullptr;
  int first_thread = 0;
};

struct Warpgroup {
  std::deque<Product> products;  // from number `executed` on
  uint32_t executed = 0;
  std::deque<std::unique_ptr<Flight>> flights;
};
extern std::deque<Warpgroup> warpgroups;

struct ProductsOver final : Condition {
  Warpgroup* group = nullptr;
  uint32_t end = 0;

  bool over() override { return group->executed >= end; }
  std::string text() override;
};
bool can_execute(const Warpgroup& group);
/// The oldest product of the warpgroup, which all its threads have issued.
void execute(Warpgroup& group);
void begin_products(int threads);
void end_products();

// ---- async.cpp

extern std::vector<Chunk> chunks;
void use_async();
char* shared_begin();
/// The offset in dynamic shared memory; a problem and false if it does not lie there.
bool in_dynamic(const void* address, size_t bytes, size_t* offset, const void* pc);
/// Address where 16-byte pieces are swizzled: bits 4 to 6 are changed by bits 7 to 9.
uint32_t swizzled(uint32_t address, int bytes);
/// May the running thread, or whoever knows `seen`, touch the chunk?
void check_chunk(const Chunk& chunk, bool write, const Clocks* seen, const char* who,
                 const void* pc);

}  // namespace usp::emulator
