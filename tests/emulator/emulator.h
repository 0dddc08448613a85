#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

/// What a test sets and asks of the emulated device.
namespace usp::emulator {

/// Order of threads, warps and blocks; and of streams: the oldest first, the newest first, a
/// shuffled one.
enum class Order { forward, reverse, shuffled };

/// The order that has this turn: three turns have all of them.
constexpr Order order_of(uint64_t turn) { return static_cast<Order>(turn % 3); }

/// When what is asynchronous within a kernel is over: at once; when nothing else can go on that
/// does not wait for it; at moments that the seed chooses.
enum class Completion { at_once, late, seeded };

/// Between the host's memory and the device's.
struct HostCopy {
  const void *to, *from;
  size_t bytes;
  bool to_device;
};

/// A test's hand on such copies: told of each that is queued; asked again and again whether it may
/// begin yet; told when it is over.
struct CopyHooks {
  std::function<void(const HostCopy&)> queued;
  std::function<bool(const HostCopy&)> may_begin;
  std::function<void(const HostCopy&)> over;
};

/// What cuBLASLt is asked for: op(A) [m, k] by op(B) [k, n], in the library's order.
struct MatmulAsked {
  int64_t m, n, k;
  cudaDataType_t type;  // of A and B
  uint32_t alignment;   // the least that the preference promises, bytes
};

/// May change where nothing is queued.
struct Options {
  Order threads = Order::forward;
  Order streams = Order::forward;
  uint64_t seed = 1;  // of the shuffled orders
  Completion completion = Completion::at_once;
  /// Each kernel that is checked runs in all orders of threads, from the same memory; what differs
  /// afterwards is a problem. A launch like one before, of other memory alone, runs in the first.
  bool every_order = false;
  bool checks = true;     // races, bounds, uninitialised reads, in instrumented kernels
  bool counters = false;  // sectors, bank conflicts, divergence, in instrumented kernels
  bool protect = true;    // a host that touches device memory dies
  /// May leave out what orders threads and copies: asked at each call of a kernel for which, and
  /// where.
  bool (*leaves_out)(const char* call, const void* place) = nullptr;
  /// Events tell when the emulator came to them, by the host's clock. Else they have a clock that
  /// every operation advances by what it does, so the same everywhere.
  bool host_clock = false;
  /// What is left to cudaMalloc, at most 1 GiB, for each device.
  size_t device_memory = size_t{1} << 30;
  int device_count = 1;
  int driver_version = CUDART_VERSION;  // 0: none installed
  int compute_capability = 90;
  int shared_bytes = 227 << 10;      // of a block that asks for more than 48 KiB; at most this much
  int kernels_need_capability = 75;  // what they are compiled for
  bool device_busy = false;          // another process has the device for itself
  bool ptx_too_new = false;          // for the driver, which would have to translate the kernels
  bool makes_tensor_maps = true;     // the driver
  bool cublas_starts = true;
  bool (*cublas_lacks)(const MatmulAsked&) = nullptr;  // a kernel for these; it has all others
  int nccl_error = 0;           // what NCCL's communicators say when they are asked
  bool nccl_hangs = false;      // what NCCL has to carry out never ends
  int nccl_version = 0;         // of the library; 0: that of its header
  double nccl_starts_late = 0;  // seconds in which a call has begun and has queued nothing
  double nccl_joins_late = 0;   // seconds for which ranks but the first linger where they join
  /// Seconds in which no rank queues anything and nothing can run: then a wait is a deadlock.
  double patience = 10;
  std::chrono::steady_clock::time_point slow_until{};  // queries of events take 0.1 ms before
  std::shared_ptr<const CopyHooks> copies;             // nullptr: they begin when they can
};
extern Options options;

/// Counts of events that tell time, since the program began.
struct TimedEvents {
  int64_t created = 0, recorded = 0;

  bool operator==(const TimedEvents&) const = default;
};
TimedEvents timed_events();

/// What cudaMallocHost has given and nobody has given back.
size_t pinned_bytes();

/// Streams run as far as they can, as a GPU's do while every host sleeps.
void run_streams();

/// Sets the options for the lifetime of the object.
class Use {
 public:
  explicit Use(const Options& now) : before_(options) { options = now; }
  ~Use() { options = before_; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Options before_;
};

/// Counts of one source line, or of all.
struct Counters {
  int64_t load_requests = 0, load_sectors = 0;  // a warp's accesses; 32 bytes of global memory
  int64_t store_requests = 0, store_sectors = 0;
  int64_t shared_requests = 0, bank_conflicts = 0;  // wavefronts beyond the ideal
  int64_t atomic_requests = 0, atomic_steps = 0;    // steps: the most lanes at one address
  int64_t divergent_branches = 0;                   // where lanes of a warp part
  int64_t barriers = 0;  // a block met, at __syncthreads or a named one; phases of an mbarrier
  int64_t boxes = 0, box_bytes = 0;  // of tensors that were copied, ends included
  int64_t product_flops = 0;         // of mma and wgmma
  int64_t exponentials = 0;          // of a thread, by the unit for special functions

  double sectors_per_load() const { return ratio(load_sectors, load_requests); }
  double sectors_per_store() const { return ratio(store_sectors, store_requests); }
  int64_t sector_bytes() const { return 32 * (load_sectors + store_sectors); }
  Counters& operator+=(const Counters& other);

 private:
  static double ratio(int64_t a, int64_t b) { return b == 0 ? 0 : static_cast<double>(a) / b; }
};

/// A mistake of a kernel or of host code, once for each place.
struct Problem {
  /// race, out of bounds, misaligned, uninitialised, divergent barrier, deadlock, device, host
  /// memory, mask, order; barrier, proxy, in flight, descriptor, tensor map, wgmma, wgmma fence,
  /// registers
  std::string kind;
  std::string detail;
  uint3 thread{}, block{};
  std::string file;  // "" where there is no debug information
  int line = 0;

  std::string text() const;
};

struct Report {
  std::vector<Problem> problems;
  Counters total;
  std::map<std::string, Counters> lines;  // by "file.cu:line", no folders

  bool has(const std::string& kind) const;
  /// All problems, one a line.
  std::string text() const;
};

/// "file.cu:line" of a place in a kernel.
std::string line_of(const void* place);

/// Kernels that were checked since the program began, by "file.cu:name", in how many different
/// grids and blocks each.
std::map<std::string, int64_t> checked_kernels();

/// What happened since the last call, after all queues have run. Until it is called, a problem
/// makes every later wait fail with cudaErrorLaunchFailure; one that nobody asked for ends the
/// process.
Report take_report();

}  // namespace usp::emulator
