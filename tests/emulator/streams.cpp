/// Streams: queues that run only when something waits for them, so that a missing wait shows.

#include "streams.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <thread>

namespace usp::emulator {
namespace {

/// What clocks know a stream by. One that is gone leaves it to the next.
struct Place {
  struct Noted {
    uint32_t operation, epoch;  // the first of its accesses
    Work work;
  };
  uint32_t operations = 0;   // that ran
  std::vector<Noted> noted;  // that the host has not all waited for
};

struct Queues {
  std::vector<std::unique_ptr<CUstream_st>> streams;  // oldest first
  std::map<int, CUstream_st*> legacy;                 // by device
  uint64_t operations = 0, run = 0;                   // queued; run
  double microseconds = 0;                            // the device's clock
  TimedEvents timed;
  uint64_t seed = 0;
  std::mt19937_64 random;
  // Threads of the host tell each other what nobody here sees, so they know the same.
  std::shared_ptr<const StreamClock> host = std::make_shared<StreamClock>();
  std::vector<Place> places;
  const CUstream_st* running = nullptr;  // whose operation runs
};

Queues& queues() {
  static Queues* queues = new Queues;
  return *queues;
}

void join(StreamClock& to, const StreamClock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

/// What is over before the operation, and the operation.
void begin_operation(CUstream_st& stream, const CUstream_st::Operation& operation) {
  StreamClock& known = stream.known;
  if (operation.host != stream.host) join(known, *(stream.host = operation.host));
  if (operation.after != nullptr) join(known, operation.after->known);
  if (!(stream.flags & cudaStreamNonBlocking)) {
    for (const auto& other : queues().streams) {
      const bool waits = other->device == stream.device && other->legacy != stream.legacy &&
                         !(other->flags & cudaStreamNonBlocking);
      if (waits) join(known, other->known);
    }
  }
  if (known.size() <= stream.place) known.resize(stream.place + 1);
  known[stream.place] = ++queues().places[stream.place].operations;
  queues().running = &stream;
}

CUstream_st* new_stream(unsigned flags, bool legacy) {
  auto& streams = queues().streams;
  std::vector<bool> taken(queues().places.size());
  for (const auto& stream : streams) taken[stream->place] = true;
  const size_t place = std::find(taken.begin(), taken.end(), false) - taken.begin();
  if (place == taken.size()) queues().places.emplace_back();
  streams.push_back(
      std::make_unique<CUstream_st>(CUstream_st{current_device(), flags, legacy, {}, place}));
  return streams.back().get();
}

/// The stream that a handle names; nullptr if there is none.
CUstream_st* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    CUstream_st*& legacy = queues().legacy[current_device()];
    if (legacy == nullptr) legacy = new_stream(cudaStreamDefault, true);
    return legacy;
  }
  for (const auto& stream : queues().streams) {
    if (stream.get() == handle) return handle;
  }
  return nullptr;
}

bool may_run(const CUstream_st& stream) {
  if (stream.queue.empty()) return false;
  const CUstream_st::Operation& next = stream.queue.front();
  if (next.after != nullptr && !next.after->passed) return false;
  if (next.may_begin && !next.may_begin()) return false;
  if (stream.flags & cudaStreamNonBlocking) return true;
  return std::none_of(queues().streams.begin(), queues().streams.end(), [&](const auto& other) {
    return other->device == stream.device && other->legacy != stream.legacy &&
           !(other->flags & cudaStreamNonBlocking) && !other->queue.empty() &&
           other->queue.front().number < next.number;
  });
}

CUstream_st* choose() {
  std::vector<CUstream_st*> candidates;
  for (const auto& stream : queues().streams) {
    if (may_run(*stream)) candidates.push_back(stream.get());
  }
  if (candidates.empty()) return nullptr;
  if (options.streams == Order::forward) return candidates.front();
  if (options.streams == Order::reverse) return candidates.back();
  if (queues().seed != options.seed) queues().random.seed(queues().seed = options.seed);
  return candidates[queues().random() % candidates.size()];
}

/// What the device's clock says when an operation of so many bytes begins.
double next_time(size_t bytes) {
  if (bytes == kNoTime) return queues().microseconds;
  if (!options.host_clock) {
    return queues().microseconds + 1 + static_cast<double>(bytes) * 1e-6;  // 1 us, and 1 TB/s
  }
  const std::chrono::duration<double, std::micro> host =
      std::chrono::steady_clock::now().time_since_epoch();
  return std::max(queues().microseconds, host.count());
}

/// Runs one operation. False if none can run.
bool run_one() {
  CUstream_st* stream = choose();
  if (stream == nullptr) return false;
  const CUstream_st::Operation next = std::move(stream->queue.front());
  stream->queue.pop_front();
  ++queues().run;
  queues().microseconds = next_time(next.bytes);
  begin_operation(*stream, next);
  next.work();
  return true;
}

/// Lets other ranks, which are threads, queue what the streams wait for.
void let_others_queue() {
  const int depth = Locked::depth;
  for (int i = 0; i < depth; ++i) lock().unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(100));
  for (int i = 0; i < depth; ++i) lock().lock();
}

/// A wait that ends when no rank has queued anything for long, nor anything has run.
class Patience {
 public:
  bool is_over() {
    const uint64_t now = queues().operations + queues().run;
    const auto time = std::chrono::steady_clock::now();
    if (now != seen_) since_ = time;
    seen_ = now;
    return time - since_ > std::chrono::duration<double>(options.patience);
  }

 private:
  uint64_t seen_ = queues().operations + queues().run;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

bool passed(const CUevent_st& event) { return event.last == nullptr || event.last->passed; }

void tell_host_of(const CUevent_st& event) {
  if (event.last != nullptr) tell_host(event.last->known);
}

/// To the operation that runs.
bool is_known(size_t place, const Place::Noted& noted) {
  const StreamClock& known = queues().running->known;
  return place < known.size() && noted.operation <= known[place];
}

/// What a query begins with.
void answer_slowly() {
  if (std::chrono::steady_clock::now() < options.slow_until) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace

thread_local int Locked::depth = 0;
thread_local bool in_host_function = false;

namespace {

CUstream_st::Operation& push(cudaStream_t stream, size_t bytes, std::shared_ptr<Moment> after,
                             std::function<void()> work) {
  auto& queue = stream_of(stream)->queue;
  queue.push_back(
      {++queues().operations, bytes, std::move(after), std::move(work), nullptr, queues().host});
  return queue.back();
}

}  // namespace

void enqueue_wait(cudaStream_t stream, std::shared_ptr<Moment> after) {
  push(stream, 0, std::move(after), [] {});
}

bool run_until(const std::function<bool()>& done) {
  return run_until(
      done, [] { return std::string("streams wait for each other, or for what no rank queues"); });
}

bool run_until(const std::function<bool()>& done, const std::function<std::string()>& waiting) {
  if (done()) return true;
  const Window window;
  Patience patience;
  while (!done()) {
    if (run_one()) continue;
    if (patience.is_over()) {
      problem("deadlock", waiting(), nullptr);
      return false;
    }
    let_others_queue();
  }
  return true;
}

bool is_stream(cudaStream_t stream) { return stream_of(stream) != nullptr; }

bool on_this_device(int device, const char* what) {
  if (device == current_device()) return true;
  problem("device",
          std::string(what) + " on device " + std::to_string(device) +
              " by a thread that has set device " + std::to_string(current_device()),
          nullptr);
  return false;
}

bool of_this_device(cudaStream_t stream, const char* what) {
  return on_this_device(stream_of(stream)->device, what);
}

void enqueue(cudaStream_t stream, size_t bytes, std::function<void()> work) {
  push(stream, bytes, nullptr, std::move(work));
}

void enqueue_when(cudaStream_t stream, size_t bytes, std::function<bool()> may_begin,
                  std::function<void()> work) {
  push(stream, bytes, nullptr, std::move(work)).may_begin = std::move(may_begin);
}

TimedEvents timed_events() {
  const Locked locked(lock());
  return queues().timed;
}

void run_streams() {
  const Locked locked(lock());
  const Window window;
  while (run_one()) {
  }
}

cudaError_t outcome() { return has_problems() ? cudaErrorLaunchFailure : cudaSuccess; }

uint32_t note_work(uint32_t epoch, const Work& work) {
  const CUstream_st& stream = *queues().running;
  uint32_t known = epoch;
  for (size_t i = 0; i < queues().places.size(); ++i) {
    auto& noted = queues().places[i].noted;
    if (i == stream.place) noted.push_back({stream.known[i], epoch, work});
    const auto is_over = [&](const Place::Noted& one) { return is_known(i, one); };
    const auto first = std::ranges::partition_point(noted, is_over);
    if (first != noted.end()) known = std::min(known, first->epoch);
  }
  return known;
}

const Work* unordered_work(uint32_t epoch) {
  uint32_t begin = 0;
  const Work* work = nullptr;  // known by all, if nothing is noted of it
  for (size_t i = 0; i < queues().places.size(); ++i) {
    const auto& noted = queues().places[i].noted;
    const auto after = std::ranges::upper_bound(noted, epoch, {}, &Place::Noted::epoch);
    if (after == noted.begin() || std::prev(after)->epoch < begin) continue;
    begin = std::prev(after)->epoch;
    work = is_known(i, *std::prev(after)) ? nullptr : &std::prev(after)->work;
  }
  return work;
}

void tell_host(const StreamClock& known) {
  StreamClock joined = *queues().host;
  join(joined, known);
  if (joined != *queues().host) queues().host = std::make_shared<StreamClock>(std::move(joined));
}

const StreamClock& known_here() { return queues().running->known; }

cudaError_t wait_for(cudaStream_t handle) {
  const CUstream_st& stream = *stream_of(handle);
  if (run_until([&] { return stream.queue.empty(); })) tell_host(stream.known);
  return outcome();
}

cudaError_t wait_for_all() {
  const bool over = run_until([] {
    return std::all_of(queues().streams.begin(), queues().streams.end(),
                       [](const auto& stream) { return stream->queue.empty(); });
  });
  if (!over) return outcome();
  StreamClock all;
  for (Place& place : queues().places) {
    all.push_back(place.operations);
    place.noted.clear();  // whatever is queued from here on comes after
  }
  tell_host(all);
  return outcome();
}

}  // namespace usp::emulator

using namespace usp::emulator;

// What each call of the runtime begins with.
#define USP_CALL(...)                                                                  \
  const Locked locked(lock());                                                         \
  if (const cudaError_t error = ready(); error != cudaSuccess) return remember(error); \
  if (!(__VA_ARGS__)) return remember(cudaErrorInvalidResourceHandle)

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  USP_CALL(true);
  if (flags > cudaStreamNonBlocking) return remember(cudaErrorInvalidValue);
  stream_of(nullptr);  // so that the default stream is the oldest
  *stream = new_stream(flags, false);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  USP_CALL(stream != nullptr && is_stream(stream));
  run_until([stream] { return stream->queue.empty(); });  // a GPU goes on with it, too
  std::erase_if(queues().streams, [&](const auto& other) { return other.get() == stream; });
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  USP_CALL(is_stream(stream) && of_this_device(stream, "a wait for a stream"));
  return remember(wait_for(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  USP_CALL(is_stream(stream) && of_this_device(stream, "a query"));
  if (stream_of(stream)->queue.empty()) return remember(wait_for(stream));
  const Window window;
  run_one();  // who asks again and again gets on
  return cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
  USP_CALL(true);
  return remember(wait_for_all());
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  USP_CALL(is_stream(stream));
  enqueue(stream, 0, [function, data] {
    tell_host(queues().running->known);  // it may tell the host
    in_host_function = true;
    function(data);
    in_host_function = false;
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  USP_CALL(true);
  *event = new CUevent_st{flags, current_device(), nullptr};
  if (!(flags & cudaEventDisableTiming)) ++queues().timed.created;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  USP_CALL(event != nullptr);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  USP_CALL(event != nullptr && is_stream(stream) && of_this_device(stream, "a record"));
  if (stream_of(stream)->device != event->device) return remember(cudaErrorInvalidResourceHandle);
  event->last = std::make_shared<Moment>();
  if (!(event->flags & cudaEventDisableTiming)) ++queues().timed.recorded;
  enqueue(stream, 0, [moment = event->last] {
    moment->passed = true;
    moment->microseconds = queues().microseconds;
    moment->known = queues().running->known;
  });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  USP_CALL(event != nullptr && is_stream(stream) && of_this_device(stream, "a wait"));
  enqueue_wait(stream, event->last);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  USP_CALL(event != nullptr && on_this_device(event->device, "a wait for an event"));
  if (run_until([event] { return passed(*event); })) tell_host_of(*event);
  return remember(outcome());
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  answer_slowly();
  USP_CALL(event != nullptr && on_this_device(event->device, "a query of an event"));
  if (passed(*event)) {
    tell_host_of(*event);
    return remember(outcome());
  }
  const Window window;
  run_one();
  return cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  USP_CALL(start != nullptr && end != nullptr && start->last != nullptr && end->last != nullptr &&
           !((start->flags | end->flags) & cudaEventDisableTiming));
  if (!passed(*start) || !passed(*end)) return remember(cudaErrorNotReady);
  *milliseconds = static_cast<float>((end->last->microseconds - start->last->microseconds) * 1e-3);
  return cudaSuccess;
}
