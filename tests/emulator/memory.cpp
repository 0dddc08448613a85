/// Device memory: a reserved range of addresses that nobody can touch but while queued work runs.

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "internal.h"

namespace usp::emulator {

char* device_begin = nullptr;
Allocation** device_blocks = nullptr;

namespace {

constexpr size_t kBeyond = size_t{1}
                           << 20;  // open behind the last block, for accesses out of bounds

/// Blocks are aligned to a granule, as cudaMalloc does, and a red zone follows each.
struct Arena {
  Arena() {
    void* range =
        mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) {
      std::perror("emulator: mmap");
      std::abort();
    }
    base = device_begin = static_cast<char*>(range);
    blocks = device_blocks =
        static_cast<Allocation**>(calloc(kReserved / kGranule, sizeof(Allocation*)));
    holes[0] = kReserved;
  }

  char* base;
  Allocation** blocks;             // of each granule, with the red zone
  std::map<size_t, size_t> holes;  // offset: bytes
  std::map<int, size_t> used;      // by device
  size_t extent = 0;               // no block ever ended behind it
  int windows = 0;
};

Arena& arena() {
  static Arena* arena = new Arena;  // outlives every static that frees
  return *arena;
}

size_t rounded(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule + kGranule; }

struct sigaction others;  // what a segmentation fault does elsewhere

void on_fault(int, siginfo_t* info, void*) {
  Arena& memory = arena();
  const char* address = static_cast<const char*>(info->si_addr);
  if (!is_device(address)) {
    sigaction(SIGSEGV, &others, nullptr);  // the instruction faults again
    return;
  }
  char text[256];
  const char* who = kernel_is_running() ? "a kernel touches device memory out of all bounds"
                                        : "host code touches device memory";
  int length = std::snprintf(text, sizeof(text), "emulator: %s at %p", who,
                             static_cast<const void*>(address));
  if (const Allocation* block = memory.blocks[(address - memory.base) / kGranule]) {
    length +=
        std::snprintf(text + length, sizeof(text) - length, ", byte %td of a block of %zu bytes",
                      address - block->base, block->bytes);
  } else {
    length += std::snprintf(text + length, sizeof(text) - length, ", which is not allocated");
  }
  text[length++] = '\n';
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, length);
  signal(SIGSEGV, SIG_DFL);
}

/// Again after each window: test frameworks install their own handler for each test.
void install_handler() {
  struct sigaction now {};
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
  others = now;
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &ours, nullptr);
}

void protect(int access) {
  const size_t bytes = std::min(arena().extent + kBeyond, kReserved);
  mprotect(arena().base, bytes, access);
}

}  // namespace

FairMutex& lock() {
  static FairMutex* mutex = new FairMutex;
  return *mutex;
}

Window::Window() {
  if (arena().windows++ == 0) protect(PROT_READ | PROT_WRITE);
}

Window::~Window() {
  if (--arena().windows > 0 || !options.protect) return;
  protect(PROT_NONE);
  install_handler();
}

bool is_allocated(const void* address, size_t bytes) {
  if (!is_device(address)) return false;
  const Allocation* block = allocation_at(address);
  return block != nullptr && block->holds(address, bytes);
}

size_t allocated_bytes(int device) { return arena().used[device]; }

void* allocate(size_t bytes, int device) {
  Arena& memory = arena();
  const size_t size = rounded(bytes);
  if (memory.used[device] + size > options.device_memory) return nullptr;
  const auto fits = [size](const auto& hole) { return hole.second >= size; };
  const auto found = std::find_if(memory.holes.begin(), memory.holes.end(), fits);
  if (found == memory.holes.end()) return nullptr;
  const auto [offset, hole] = *found;
  memory.holes.erase(found);
  if (hole > size) memory.holes[offset + size] = hole - size;
  auto* block = new Allocation{memory.base + offset, bytes, device};
  block->initialised = static_cast<char*>(calloc(bytes, 1));
  std::fill_n(memory.blocks + offset / kGranule, size / kGranule, block);
  memory.used[device] += size;
  if (offset + size > memory.extent) {
    memory.extent = offset + size;
    if (memory.windows > 0) protect(PROT_READ | PROT_WRITE);
  }
  const Window window;
  std::memset(block->base, 0xff, bytes);  // NaNs: kernels without checks must not read them either
  return block->base;
}

bool release(void* address) {
  Arena& memory = arena();
  if (!is_device(address)) return false;
  Allocation* block = allocation_at(address);
  if (block == nullptr || block->base != address) return false;
  const size_t offset = block->base - memory.base, size = rounded(block->bytes);
  std::fill_n(memory.blocks + offset / kGranule, size / kGranule, nullptr);
  memory.used[block->device] -= size;
  free(block->initialised);
  delete block;
  auto hole = memory.holes.emplace(offset, size).first;
  const auto after = std::next(hole);
  if (after != memory.holes.end() && after->first == offset + size) {
    hole->second += after->second;
    memory.holes.erase(after);
  }
  if (hole != memory.holes.begin()) {
    const auto before = std::prev(hole);
    if (before->first + before->second == offset) {
      before->second += hole->second;
      memory.holes.erase(hole);
    }
  }
  return true;
}

std::span<Cell> Allocation::cells_of(const void* address, size_t count) {
  if (cells == nullptr) cells = std::make_unique<Cells>(bytes);
  return cells->of(static_cast<const char*>(address) - base, count);
}

void Allocation::set_initialised(const void* address, size_t count, bool value) {
  std::memset(initialised + (static_cast<const char*>(address) - base), value, count);
}

}  // namespace usp::emulator
