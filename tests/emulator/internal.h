#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "emulator.h"
#include "fair_mutex.h"

/// What the parts of the emulator know of each other. All of it under lock(), but for the hooks.
namespace usp::emulator {

struct Clocks;

FairMutex& lock();
/// Holds the lock, once for each call that is under way.
class Locked {
 public:
  explicit Locked(FairMutex& mutex) : held_(mutex) { ++depth; }
  ~Locked() { --depth; }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

  static thread_local int depth;

 private:
  std::lock_guard<FairMutex> held_;
};

// ---- memory.cpp

/// The last accesses to some bytes. An epoch is a number that grows with every launch, block and
/// barrier; a clock grows with every operation of a warp within an epoch.
struct Access {
  uint32_t epoch = 0;
  uint16_t thread = 0, clock = 0;
  uint32_t releases = 0;  // or the number of a set of readers
};
struct Cell {
  Access writer, reader;
};

/// The cells of a piece of memory: as large as the accesses allow that there have been, so that
/// each is of whole cells, and no two threads meet in one that touch different bytes.
class Cells {
 public:
  explicit Cells(size_t bytes = 0) : bytes_(bytes), cells_(count()) {}

  size_t bytes() const { return bytes_; }
  std::span<Cell> of(size_t offset, size_t bytes) {
    if (((offset | bytes) & ((size_t{1} << shift_) - 1)) != 0) refine(offset | bytes);
    return {cells_.data() + (offset >> shift_), bytes >> shift_};
  }

 private:
  size_t count() const { return (bytes_ + (size_t{1} << shift_) - 1) >> shift_; }
  void refine(size_t multiple);

  size_t bytes_;
  int shift_ = 3;  // a cell has 2^shift_ bytes
  std::vector<Cell> cells_;
};

/// A block of device memory; shared memory while a kernel runs.
struct Allocation {
  char* base = nullptr;
  size_t bytes = 0;
  int device = 0;
  char* initialised = nullptr;             // one for each byte
  std::unique_ptr<Cells> cells = nullptr;  // made when a kernel first touches it

  bool holds(const void* address, size_t count) const {
    const size_t offset = static_cast<const char*>(address) - base;
    return address >= base && offset <= bytes && count <= bytes - offset;
  }
  std::span<Cell> cells_of(const void* address, size_t count);
  void set_initialised(const void* address, size_t count, bool value);
};

inline constexpr size_t kReserved = size_t{1} << 30, kGranule = 256;
extern char* device_begin;          // null before the first cudaMalloc
extern Allocation** device_blocks;  // of each granule

/// Is the address device memory, allocated or not?
inline bool is_device(const void* address) {
  return static_cast<size_t>(static_cast<const char*>(address) - device_begin) < kReserved &&
         device_begin != nullptr;
}
/// The block that the device address lies in, or in the red zone behind; nullptr if there is none.
inline Allocation* allocation_at(const void* address) {
  return device_blocks[(static_cast<const char*>(address) - device_begin) / kGranule];
}
/// Device memory that a call names: all `bytes` in one live block.
bool is_allocated(const void* address, size_t bytes);
void* allocate(size_t bytes, int device);
bool release(void* address);
size_t allocated_bytes(int device);
/// Makes device memory accessible while it lives.
class Window {
 public:
  Window();
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
};

// ---- copies.cpp: pinned blocks

bool is_pinned(const void* address);

// ---- threads.cpp

/// The thread that runs, for messages; nullptr outside kernels. One for each thread of the system.
struct KernelThread;
struct Clocks;
extern thread_local KernelThread* current;
bool kernel_is_running();

struct Launch {
  dim3 grid, block;
  size_t dynamic_bytes;
  void (*call)(const void*);
  std::vector<char> parameters;
  const void* kernel;
  bool instrumented;
};
/// As the options say.
void run(const Launch& launch);
void run(const Launch& launch, Order order);
/// Called by a thread, which never goes on.
void end_kernel();

// ---- orders.cpp

/// Runs a launch in every order; where it is like one before, in the first order alone.
void run_in_every_order(const Launch& launch);
/// The kernel is about to write there.
void remember_overwritten(const Allocation& block, const void* address, size_t bytes);

// ---- checks.cpp

/// What an operation of a stream is, for messages: as "a kernel", and where it stands or was
/// called.
struct Work {
  const char* what;
  const void* place;
};
#define USP_PLACE __builtin_return_address(0)  // where the host called the function

/// Whether the address lies in the running kernel's shared memory.
bool is_shared(const void* address);
void check_access(const void* address, size_t bytes, bool write, bool atomic, const void* pc);
/// A copy that the running thread starts reads or writes global memory.
void check_copy(const void* address, size_t bytes, bool write, const void* pc);
/// Shared memory is undefined again.
void begin_block();
/// Is what is recorded before what the running thread does?
bool is_before(const Access& past);
/// As the running thread does it now.
Access access_now();
/// The async proxy reads or writes shared memory: is what threads did there before, and fenced?
/// Threads are those of a warp, or one.
void check_proxy(const void* address, size_t bytes, bool write,
                 const std::vector<const Clocks*>& seen, int warp, int thread, const void* pc);
/// The async proxy wrote it.
void mark_written(const void* address, size_t bytes, bool by_thread);
uint32_t current_epoch();
/// What comes is ordered after all accesses of the block.
void begin_epoch();
void begin_launch(const Launch& launch, bool checked);
/// `current` is not used: an operation of a library reads or writes device memory.
void check_read(const void* address, size_t bytes, const char* who);
/// The running operation is no kernel: what it reads and writes of device memory from here on may
/// race with what streams do that nothing orders.
void begin_call(const Work& work);
void check_call(const void* address, size_t bytes, bool write);
/// A kernel without instrumentation ran: nobody knows what it has written.
void forget_initialised();

// ---- counters.cpp

struct Event {
  const void* pc;
  const void* address;  // nullptr: a basic block begins
  uint32_t bytes;
  bool write, shared, atomic;
  bool meets = false;  // all lanes come here before any goes on
};
/// Reissues what the lanes of a warp did as one that executes in lock step would, but for what
/// comes after a place where all meet and some are to come: those that are not over.
void replay(std::vector<Event>* logs, int lanes, unsigned over);

// ---- report.cpp

/// `other`: a second place, whose line ends the sentence.
void problem(const std::string& kind, const std::string& detail, const void* pc,
             const void* other = nullptr);
/// A place in the function's first line, for problem().
inline const void* place_of(const void* function) { return static_cast<const char*>(function) + 1; }
bool has_problems();
/// Has a kernel done what makes a GPU give the process up: an access that is out of bounds, not
/// aligned or of the host's memory?
bool kernel_has_failed();
/// As "kernel" or "kernel<float, 4>", for messages; lives for ever.
const char* keep_name(const void* function);
Counters& counters_of(const void* pc);
void count_checked(const Launch& launch);

// ---- streams.cpp

/// Queues work of about `bytes` in a stream. kNoTime: nothing that a GPU would do.
inline constexpr size_t kNoTime = ~size_t{0};
void enqueue(cudaStream_t stream, size_t bytes, std::function<void()> work);
bool is_stream(cudaStream_t stream);
/// Runs queued work, in the order that the options say, until the stream is empty.
cudaError_t wait_for(cudaStream_t stream);
cudaError_t wait_for_all();
/// Waits are over: success unless a problem was found.
cudaError_t outcome();
/// The running operation's accesses have this epoch or a later one. Those of all work before the
/// epoch that is returned are known to be over.
uint32_t note_work(uint32_t epoch, const Work& work);
/// The work of that epoch, unless it is over before the running operation, whatever order streams
/// take: then nullptr.
const Work* unordered_work(uint32_t epoch);
/// May not call the runtime.
extern thread_local bool in_host_function;

// ---- devices.cpp

/// What every call of the runtime begins with: is there a device that this driver can use?
cudaError_t ready();
int current_device();
/// Remembers an error for cudaGetLastError.
cudaError_t remember(cudaError_t error);

}  // namespace usp::emulator
