#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace usp {

class Accelerator;
class Allocator;
class Recorder;
class Runtime;

/// Nanoseconds that this thread has spent on a core: they count while it computes, not while it
/// waits.
int64_t thread_cpu_ns();
/// From here on this thread's clock goes on from `ns`, that of a thread whose work it takes over.
void continue_thread_cpu_ns(int64_t ns);

/// Says which strand this thread is, from here on, of a rank whose program runs as two in turns,
/// each on a thread of its own. Slices of one lane must nest, so each strand has lanes of its own.
void set_thread_turn(int turn);
/// 0 for the rank's own thread.
int thread_turn();

/// Collects timed spans and writes them as Chrome trace events, which https://ui.perfetto.dev
/// opens. Off until record(true); an unrecorded span costs one branch.
///
/// A rank's lanes are its main thread, which runs all phases and ops, and its communication
/// threads. Two strands that take turns are two main threads. Where an accelerator does the work,
/// the main thread's spans say when the host queued it, and further lanes when the device did it:
/// one of its phases and ops, others of what it does for messages. OpenMP's workers have none. The
/// matmul library starts parallel regions of its own and does not report them, and a worker's CPU
/// clock runs on while the worker spins for the next region. A lane made from either would show
/// work where there is none. What an op loses on serial parts and on unequal workers shows in its
/// GFLOP/s.
class Tracer {
 public:
  /// One finished span. Names are string literals: they are stored as views.
  struct Span {
    std::string_view name;
    std::string_view category;  ///< "phase", "op", ...
    int64_t begin_ns;           ///< by the host: when the work was done or, for a device, queued
    int64_t end_ns;
    int64_t cpu_begin_ns;  ///< by the thread's CPU clock; 0 on meta
    int64_t cpu_end_ns;
    double flops;              ///< of a phase: those of the ops inside
    int64_t bytes;             ///< read and written, as the op's operands imply; 0 for a phase
    int64_t step;              ///< training step; -1 for none
    int64_t number = -1;       ///< shown after the name: "block 3"; -1: none
    int64_t micro_batch = -1;  ///< of its step; -1: none, or that of the phase around
    /// When an accelerator did the work, by the host's clock; its marks while recording is on.
    int64_t device_begin = -1, device_end = -1;
    int turn = 0;  ///< of the strand it belongs to: see set_thread_turn()

    bool on_device() const { return device_begin >= 0; }
  };
  /// A call of a Communicator: queued, carried out, waited for.
  struct Exchange {
    std::string group;  ///< its communicator's name
    int64_t group_id;   ///< tells it from others of that name
    /// World rank of each rank of the communicator, which all its exchanges share.
    std::shared_ptr<const std::vector<int>> members;
    std::string_view kind;  ///< "all_reduce", ...
    int64_t number;         ///< of its kind of queue: see Operation
    int peer;               ///< send, recv: rank within the group; else -1
    int64_t payload_bytes, wire_bytes;
    int64_t step;
    int64_t queued_ns, queued_cpu_ns;    ///< by the main thread, and its CPU clock then
    int64_t begin_ns, end_ns;            ///< carried out by the communication thread; else 0
    int64_t wait_begin_ns, wait_end_ns;  ///< the main thread waits for it
    int64_t wait_cpu_begin_ns, wait_cpu_end_ns;
    /// What an accelerator does for it in a queue beside its own, as for a Span.
    struct DevicePart {
      std::string_view where_to;  ///< of a copy; empty: this is the whole operation
      int64_t bytes, begin, end;
    };
    /// In order. The first one's begin tells when the device came to the operation.
    std::vector<DevicePart> device_parts;
    /// For so long the accelerator's own queue stood still, as for a Span.
    int64_t device_wait_begin = -1, device_wait_end = -1;
    int turn = 0;  ///< of the strand that waits

    /// Whether the device carried it out, and nobody of the host.
    bool by_device() const { return !device_parts.empty() && device_parts[0].where_to.empty(); }
  };

  /// On an accelerator the beginning and the end wait for it. The spans and exchanges of its lanes
  /// get their times when recording ends.
  void record(bool on);
  /// nullptr: the host's clock tells when work is done.
  void take_times_from(Accelerator* accelerator) { accelerator_ = accelerator; }
  bool recording() const { return recording_; }
  /// For between two steps: an accelerator's marks are read here.
  void set_step(int64_t step);
  int64_t step() const { return step_; }
  void add(const Span& span) { spans_.push_back(span); }
  /// A message. One that comes when recording has ended gets its device's times at once.
  void add(Exchange exchange);
  const std::vector<Span>& spans() const { return spans_; }
  const std::vector<Exchange>& exchanges() const { return exchanges_; }

  /// When the first span begins; INT64_MAX where nothing was recorded.
  int64_t origin_ns() const;
  /// The spans as trace events of process `rank`. Each stands on a line of its own, after a comma;
  /// times count from `origin_ns`. A click on an event shows its args: step, flops, bytes,
  /// micro_batch, the achieved GFLOP/s and GB/s, and on a device when the host had queued it. The
  /// process is labelled with the drift of the device's clock.
  std::string span_events(int rank, int64_t origin_ns) const;

  /// Writes the trace of a run of one rank to `path`, with the memory of the current runtime's
  /// allocator; throws Error if it cannot.
  void write(const std::string& path, std::string_view chapter) const;

 private:
  bool recording_ = false;
  int64_t step_ = -1;
  Accelerator* accelerator_ = nullptr;
  std::vector<Span> spans_;
  std::vector<Exchange> exchanges_;
  size_t timed_spans_ = 0, timed_exchanges_ = 0;  ///< those behind hold marks while recording is on
};

/// The main thread's lanes, one for each turn: 0 and 1. Those of communication threads follow.
inline constexpr int kTurns = 2;
/// The first lane of what an accelerator does in its own queue, one for each turn as well; those of
/// its other queues follow.
inline constexpr int kDeviceLane = 1000;

/// Writes a trace file. `other_data` is a JSON object of facts about the run; `events` are as
/// Tracer::span_events() gives them. Throws Error if it cannot.
void write_trace_file(const std::string& path, const std::string& other_data,
                      const std::vector<std::string>& events);
/// The events that name a process and its main thread, lane 0. A comma stands before each, as
/// before all events.
std::string process_name_events(int rank);
/// The event that names a lane of process `rank`.
std::string lane_name_event(int rank, int lane, std::string_view name);

/// Live bytes over time as trace events of process `rank`, a counter for each category and for each
/// named buffer of communication: what the allocator's events say, from `origin_ns` on.
std::string memory_events(const Allocator& allocator, int rank, int64_t origin_ns);

/// Records a span that lasts as long as the object, on the current runtime's tracer. An
/// accelerator's profiler sees it as a range, recorded or not.
class TraceScope {
 public:
  /// What tells a phase from others of its name; see Tracer::Span.
  struct Label {
    int64_t number = -1;
    int64_t micro_batch = -1;
  };

  /// A phase, which counts the operations of the ops inside.
  explicit TraceScope(std::string_view name, Label label);
  explicit TraceScope(std::string_view name) : TraceScope(name, Label()) {}
  /// An op. `on_device`: its kernels are the accelerator's, where there is one.
  TraceScope(std::string_view name, std::string_view category, int64_t flops = 0, int64_t bytes = 0,
             bool on_device = true);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  TraceScope(std::string_view name, std::string_view category, Label label, int64_t flops,
             int64_t bytes, bool on_device);

  Accelerator* accelerator_ = nullptr;  ///< nullptr where there is none
  Runtime* runtime_ = nullptr;          ///< nullptr when nothing is recorded
  Recorder* recorder_ = nullptr;        ///< of a phase, nullptr where nobody is told
  Tracer::Span span_;
};

}  // namespace usp
