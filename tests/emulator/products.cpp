/// Products of warps (ldmatrix, mma) and of warpgroups (wgmma), and the registers that they use.

#include <algorithm>
#include <cmath>

#include "async.h"

namespace usp::emulator {

std::deque<Warpgroup> warpgroups;

namespace {

constexpr uint32_t kPoison = 0x7fbadbad;

struct Registers {  // an array that products used
  const char *begin, *end;
  bool touched;
  uint32_t read_by = 0;  // as a, by this product, 1 +
};

struct ThreadState {
  uint32_t products = 0;         // issued
  std::vector<uint32_t> groups;  // ends, as numbers of products
  uint32_t groups_over = 0;
  bool fenced = false;
  std::vector<Registers> registers;
  unsigned mma = 0;
};
std::vector<ThreadState> thread_states;
uint32_t warp_words[32][2][kWarp][6];

ThreadState& mine() { return thread_states[current->number]; }

struct Operand {
  uint32_t start, leading, stride;
  int swizzle, base;
  bool mn;

  Operand(uint64_t descriptor, bool mn_) : mn(mn_) {
    start = (descriptor & 0x3fff) << 4;
    leading = (descriptor >> 16 & 0x3fff) << 4;
    stride = (descriptor >> 32 & 0x3fff) << 4;
    constexpr int kSwizzles[] = {0, 128, 64, 32};
    swizzle = kSwizzles[descriptor >> 62];
    base = static_cast<int>(descriptor >> 49 & 7);
  }

  /// Address of 8 adjacent elements: row `i` of m or n and k, k + 1, ...; or i, i + 1, ... and k.
  uint32_t address(int i, int k) const {
    uint32_t offset;
    if (!mn) {
      offset = swizzle == 0 ? i % 8 * 16 + i / 8 * stride + k / 8 * leading
                            : i % 8 * swizzle + i / 8 * stride + k * 2;
    } else {
      offset = swizzle == 0 ? k % 8 * 16 + i / 8 * stride + k / 8 * leading
                            : i % (swizzle / 2) * 2 + i / (swizzle / 2) * leading +
                                  k % 8 * swizzle + k / 8 * stride;
    }
    return swizzled(start + offset, swizzle);
  }
  /// All pieces of rows [begin, end).
  template <class F>
  void each(int begin, int end, F use) const {
    if (!mn) {
      for (int i = begin; i < end; ++i) {
        use(address(i, 0), i, 0);
        use(address(i, 8), i, 8);
      }
    } else {
      for (int k = 0; k < 16; ++k) {
        for (int i = begin; i < end; i += 8) use(address(i, k), i, k);
      }
    }
  }
  const char* problem_text(int rows) const {
    static const char* const kTexts[] = {
        "a swizzle's pattern has to begin at a multiple of its 1024, 512 or 256 bytes",
        "nothing lies between the tile's groups of 8: a stride is 0",
        "a base offset is not emulated"};
    if (base != 0) return kTexts[2];
    if (swizzle != 0 && (start >> 7 & (swizzle / 16 - 1)) != 0) return kTexts[0];
    if (stride == 0 && (mn ? true : rows > 8)) return kTexts[1];
    return nullptr;
  }
};

float bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

/// A row and a column of register i of a thread.
int row_of(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
int column_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

void fetch(const Operand& operand, int rows, float* to) {  // [rows][16]
  operand.each(0, rows, [&](uint32_t address, int i, int k) {
    uint16_t values[8];
    const uint32_t offset = address - kSharedBegin;
    if (offset + sizeof(values) > kMaxDynamicBytes) return;
    std::memcpy(values, shared_begin() + offset, sizeof(values));
    for (int e = 0; e < 8; ++e) {
      if (operand.mn) {
        to[(i + e) * 16 + k] = bf16(values[e]);
      } else {
        to[i * 16 + k + e] = bf16(values[e]);
      }
    }
  });
}

void multiply(const float* __restrict a, const float* __restrict b, int n, float* __restrict d) {
  static std::vector<float> turned;
  turned.resize(static_cast<size_t>(16) * n);
  for (int j = 0; j < n; ++j) {
    for (int k = 0; k < 16; ++k) turned[k * n + j] = b[j * 16 + k];
  }
  for (int i = 0; i < 64; ++i) {
    float* __restrict row = d + static_cast<size_t>(i) * n;
    for (int k = 0; k < 16; ++k) {
      const float left = a[i * 16 + k];
      const float* __restrict right = turned.data() + static_cast<size_t>(k) * n;
      for (int j = 0; j < n; ++j) row[j] += left * right[j];
    }
  }
}

void check_product(const Product& product, int warp, int group, const void* pc) {
  const std::vector<const Clocks*>& seen = product.seen[warp];
  const uint32_t number = mine().groups.size() + 1;
  const auto check = [&](const Operand& operand, int begin, int end, const char* which) {
    if (const char* text = operand.problem_text(end - begin)) problem("descriptor", text, pc);
    bool outside = false, mixed = false;
    struct {
      uint32_t number = 0;
      int line = 0, byte = 0;
    } first;
    operand.each(begin, end, [&](uint32_t address, int i, int k) {
      const uint32_t offset = address - kSharedBegin;
      if (offset + kChunk > kMaxDynamicBytes) {
        outside = true;
        return;
      }
      Chunk& chunk = chunks[offset / kChunk];
      bool ordered = chunk.barrier == 0;
      for (const Clocks* clocks : seen) {
        ordered |=
            !chunk.flight && knows(clocks, layout.barriers + chunk.barrier - 1) > chunk.phase;
      }
      if (!ordered) check_chunk(chunk, false, nullptr, which, pc);
      if (chunk.copy != 0) check_chunk(chunk, false, seen[0], which, pc);
      if (chunk.barrier != 0 && !mixed) {  // lines of the box have to be lines of the operand
        const int line = operand.mn ? k : i, byte = 2 * (operand.mn ? i : k);
        if (chunk.number != first.number) {
          first = {chunk.number, chunk.line - line, chunk.byte - byte};
        } else if (chunk.line - line != first.line || chunk.byte - byte != first.byte) {
          mixed = true;
        }
        if (chunk.swizzle != operand.swizzle) {
          problem("descriptor",
                  std::string(which) + " is swizzled over " + std::to_string(chunk.swizzle) +
                      " bytes by the copy, over " + std::to_string(operand.swizzle) +
                      " in the descriptor",
                  pc);
        } else if (mixed) {
          problem("descriptor",
                  std::string(which) + ": (" + std::to_string(i) + ", " + std::to_string(k) +
                      ") is byte " + std::to_string(chunk.byte) + " of line " +
                      std::to_string(chunk.line) + " of what the copy brought, not byte " +
                      std::to_string(first.byte + byte) + " of line " +
                      std::to_string(first.line + line),
                  pc);
        }
      }
      chunk.group[group] = number;
      if (chunk.barrier == 0) {
        if (accesses_seen)
          check_proxy(shared_begin() + offset, kChunk, false, seen, group * 4 + warp, -1, pc);
      }
    });
    if (outside) problem("out of bounds", std::string(which) + " reads beyond shared memory", pc);
  };
  if (!product.a_registers) {
    check(Operand(product.a, product.a_mn), warp * 16, warp * 16 + 16, "wgmma's a");
  }
  check(Operand(product.b, product.b_mn), 0, product.flight->n, "wgmma's b");
}

void watch(ThreadState& state) {
  const char *begin = nullptr, *end = nullptr;
  for (const Registers& registers : state.registers) {
    begin = begin == nullptr ? registers.begin : std::min(begin, registers.begin);
    end = std::max(end, registers.end);
  }
  current->watch_begin = begin;
  current->watch_end = end;
}

Registers& registers_of(ThreadState& state, const void* d, int count, bool* is_new) {
  // `d` may be where another array was.
  const char* begin = static_cast<const char*>(d);
  for (Registers& registers : state.registers) {
    if (registers.begin == begin) return *is_new = false, registers;
  }
  *is_new = true;
  state.registers.push_back({begin, begin + count * sizeof(float), false});
  watch(state);
  return state.registers.back();
}

Flight* flight_of(Warpgroup& group, int thread, const void* address) {
  for (const auto& flight : group.flights) {
    if (flight->registers[thread] == nullptr) continue;
    const char* begin = reinterpret_cast<const char*>(flight->registers[thread]);
    if (address >= begin && address < begin + flight->count * sizeof(float)) return flight.get();
  }
  return nullptr;
}

}  // namespace

bool can_execute(const Warpgroup& group) {
  return !group.products.empty() && group.products.front().issued == kWarpgroup;
}

std::string ProductsOver::text() {
  return "waits for a wgmma that not all 128 threads of the warpgroup issue";
}

void execute(Warpgroup& group) {
  Product& product = group.products.front();
  Flight& flight = *product.flight;
  static std::vector<float> a(64 * 16), b;
  b.resize(static_cast<size_t>(flight.n) * 16);
  if (product.a_registers) {
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      for (int i = 0; i < 8; ++i) {
        const uint32_t word = product.a_values[thread * 4 + i / 2];
        const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
        const int k = thread % 4 * 2 + i % 2 + i / 4 * 8;
        a[row * 16 + k] = bf16(static_cast<uint16_t>(i % 2 ? word >> 16 : word));
      }
    }
  } else {
    fetch(Operand(product.a, product.a_mn), 64, a.data());
  }
  fetch(Operand(product.b, product.b_mn), flight.n, b.data());
  if (!product.add) std::fill(flight.values.begin(), flight.values.end(), 0.f);
  multiply(a.data(), b.data(), flight.n, flight.values.data());
  if (options.counters) {
    counters_of(product.pc).product_flops += int64_t{2} * 64 * flight.n * 16;
  }
  group.products.pop_front();
  ++group.executed;
}

void begin_products(int threads) {
  warpgroups.clear();
  for (int i = 0; i < threads / kWarpgroup; ++i) warpgroups.emplace_back();
  thread_states.assign(threads, {});
}

void end_products() {
  for (Warpgroup& group : warpgroups) {
    if (group.flights.empty()) continue;
    problem("in flight", "the block ends before a wgmma that it began is waited for",
            group.flights.front()->pc);
  }
}

void check_registers(const void* address, size_t bytes, bool write, const void* pc) {
  if (current->number / kWarpgroup >= static_cast<int>(warpgroups.size())) return;
  ThreadState& state = mine();
  for (Registers& registers : state.registers) {
    const char* at = static_cast<const char*>(address);
    if (at >= registers.end || at + bytes <= registers.begin) continue;
    registers.touched = true;
    if (write && registers.read_by > 0) {
      problem(
          "in flight",
          "changes registers that a wgmma reads as a, without the wgmma_wait of its group before",
          pc);
    }
    Warpgroup& group = warpgroups[current->number / kWarpgroup];
    if (flight_of(group, current->number % kWarpgroup, address) != nullptr) {
      problem("in flight",
              std::string(write ? "changes" : "reads") +
                  " accumulators of a wgmma without the wgmma_wait of its group before",
              pc);
    }
  }
}

void ldmatrix(uint32_t* d, const void* row, bool transposed) {
  USP_HERE;
  if (accesses_seen) check_access(row, 16, false, false, pc);
  if (options.counters) current->log->push_back({pc, row, 16, false, true, false});
  const uint64_t* const rows = values_of_warp(reinterpret_cast<uintptr_t>(row), pc);
  const int lane = current->lane;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int line = transposed ? lane % 4 * 2 + e : lane / 4;
      const int column = transposed ? lane / 4 : lane % 4 * 2 + e;
      pair[e] = reinterpret_cast<const uint16_t*>(rows[i * 8 + line])[column];
    }
    d[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

void stmatrix(void* row, const uint32_t* d) {
  USP_HERE;
  if (accesses_seen) check_access(row, 16, true, false, pc);
  if (options.counters) current->log->push_back({pc, row, 16, true, true, false});
  const uint64_t* const rows = values_of_warp(reinterpret_cast<uintptr_t>(row), pc);
  const int lane = current->lane;
  for (int i = 0; i < 4; ++i) {
    std::memcpy(reinterpret_cast<char*>(rows[i * 8 + lane / 4]) + lane % 4 * 4, &d[i], 4);
  }
}

void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b) {
  USP_HERE;
  const int warp = current->number / kWarp, lane = current->lane;
  auto& words = warp_words[warp][mine().mma++ % 2];  // two: lanes may be one call apart
  std::copy_n(a, 4, words[lane]);
  std::copy_n(b, 2, words[lane] + 4);
  values_of_warp(0, pc);
  if (options.counters && lane == 0) counters_of(pc).product_flops += 2 * 16 * 8 * 16;
  // The lane's two rows of a and two columns of b: a word has two neighbors of one of them.
  float rows[16][2], columns[16][2];
  for (int k = 0; k < 16; k += 2) {
    for (int i = 0; i < 2; ++i) {
      const uint32_t left = words[lane / 4 * 4 + k % 8 / 2][i + k / 8 * 2];
      const uint32_t right = words[(lane % 4 * 2 + i) * 4 + k % 8 / 2][4 + k / 8];
      rows[k][i] = bf16(static_cast<uint16_t>(left));
      rows[k + 1][i] = bf16(static_cast<uint16_t>(left >> 16));
      columns[k][i] = bf16(static_cast<uint16_t>(right));
      columns[k + 1][i] = bf16(static_cast<uint16_t>(right >> 16));
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 4; ++i) d[i] += rows[k][i / 2] * columns[k][i % 2];
  }
}

void wgmma_fence() {
  USP_ORDERS();
  ThreadState& state = mine();
  state.fenced = true;
  for (Registers& registers : state.registers) registers.touched = false;
}

void wgmma(float* d, int count, const uint32_t* a_registers, uint64_t a, uint64_t b, bool add,
           bool a_mn, bool b_mn) {
  USP_HERE;
  use_async();
  clocks_used = true;
  ThreadState& state = mine();
  const int number = current->number / kWarpgroup, thread = current->number % kWarpgroup;
  if (number >= static_cast<int>(warpgroups.size())) {
    problem("wgmma", "needs a warpgroup of 128 threads", pc);
    end_kernel();
  }
  Warpgroup& group = warpgroups[number];

  bool is_new;
  Registers& registers = registers_of(state, d, count, &is_new);
  if (is_new ? !state.fenced : registers.touched) {
    problem("wgmma fence",
            is_new ? "no wgmma_fence before the first wgmma with these accumulators"
                   : "accumulators were touched, and no wgmma_fence came after",
            pc);
  }
  registers.touched = false;

  // The operation, which may be one that other threads have issued.
  const uint32_t index = state.products++;
  while (group.executed + group.products.size() <= index) group.products.emplace_back();
  Product& product = group.products[index - group.executed];
  Flight* flight = product.flight;
  if (flight == nullptr) {
    flight = flight_of(group, thread, d);
    if (flight == nullptr) {
      group.flights.push_back(std::make_unique<Flight>());
      flight = group.flights.back().get();
      flight->count = count;
      flight->pc = pc;
      flight->n = 2 * count;
      flight->values.assign(static_cast<size_t>(64) * flight->n, 0.f);
    }
    product.flight = flight;
    product.a = a, product.b = b;
    product.add = add, product.a_mn = a_mn, product.b_mn = b_mn;
    product.a_registers = a_registers != nullptr;
    if (product.a_registers) product.a_values.resize(kWarpgroup * 4);
    product.pc = pc;
  } else if (product.pc != pc || product.a != a || product.b != b || product.add != add) {
    problem("wgmma", "threads of a warpgroup do not agree in its operands", pc);
  }
  flight->last = index + 1;
  if (flight->registers[thread] == nullptr) {
    flight->registers[thread] = d;
    ++flight->users;
    for (int i = 0; i < count; ++i) {
      flight->values[static_cast<size_t>(row_of(thread, i)) * flight->n + column_of(thread, i)] =
          d[i];
      d[i] = std::bit_cast<float>(kPoison);
    }
  } else if (flight->registers[thread] != d) {
    problem("wgmma", "threads of a warpgroup do not agree in its accumulators", pc);
  }
  if (a_registers != nullptr) {
    std::copy_n(a_registers, 4, product.a_values.data() + thread * 4);
    bool a_new;
    Registers& left = registers_of(state, a_registers, 4, &a_new);
    if (a_new ? !state.fenced : left.touched) {
      problem("wgmma fence", "registers of a were written, and no wgmma_fence came after", pc);
    }
    left.touched = false;
    left.read_by = index + 1;
  }

  const int warp = thread / kWarp;
  std::vector<const Clocks*>& seen = product.seen[warp];
  if (seen.empty() || seen.back() != current->seen) seen.push_back(current->seen);
  if (++product.lanes[warp] == kWarp && options.checks) check_product(product, warp, number, pc);
  ++product.issued;
  if (options.completion == Completion::at_once) {
    while (can_execute(group)) execute(group);
  }
}

void wgmma_commit() {
  USP_ORDERS();
  mine().groups.push_back(mine().products);
}

void wgmma_wait(int pending) {
  USP_ORDERS();
  if (options.counters) current->log->push_back({pc, nullptr, 0, false, false, false, true});
  ThreadState& state = mine();
  const int number = current->number / kWarpgroup, thread = current->number % kWarpgroup;
  Warpgroup& group = warpgroups[number];
  state.fenced = false;
  if (state.groups.size() <= static_cast<size_t>(pending)) return;
  const uint32_t over = static_cast<uint32_t>(state.groups.size() - pending);
  ProductsOver condition;
  condition.group = &group;
  condition.end = state.groups[over - 1];
  park(condition, pc);
  current->seen = advance(current->seen, layout.groups + number, over);
  for (Registers& registers : state.registers) {
    if (registers.read_by <= condition.end) registers.read_by = 0;
  }
  for (const auto& flight : group.flights) {
    float* d = flight->registers[thread];
    if (d == nullptr || flight->last > condition.end) continue;
    bool changed = false;
    for (int i = 0; i < flight->count; ++i) {
      changed |= std::bit_cast<uint32_t>(d[i]) != kPoison;
      d[i] =
          flight->values[static_cast<size_t>(row_of(thread, i)) * flight->n + column_of(thread, i)];
    }
    if (changed) problem("in flight", "accumulators were changed before this wait", pc);
    flight->registers[thread] = nullptr;
    --flight->users;
  }
  std::erase_if(group.flights, [&](const auto& flight) {
    return flight->users == 0 && flight->last <= group.executed;
  });
}

void wgmma_done(const float* d) {
  USP_HERE;
  Warpgroup& group = warpgroups[current->number / kWarpgroup];
  if (flight_of(group, current->number % kWarpgroup, d) != nullptr) {
    problem("in flight",
            "accumulators are not over after this wait: their wgmma is not committed, or in a "
            "group that may still be pending",
            pc);
  }
}

float fast_exp2(float x) {
  USP_HERE;
  if (options.counters) ++counters_of(pc).exponentials;
  return exp2f(x);
}

}  // namespace usp::emulator
