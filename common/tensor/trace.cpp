#include "tensor/trace.h"

#include <algorithm>
#include <ctime>
#include <map>

#include "base/check.h"
#include "base/clock.h"
#include "base/file_writer.h"
#include "base/machine.h"
#include "base/threads.h"
#include "tensor/marks.h"
#include "tensor/recorder.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

thread_local int64_t cpu_ns_before = 0;  ///< of the threads whose clock this one carries on
thread_local int turn_of_thread = 0;

}  // namespace

int64_t thread_cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return cpu_ns_before + int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void continue_thread_cpu_ns(int64_t ns) { cpu_ns_before += ns - thread_cpu_ns(); }

void set_thread_turn(int turn) { turn_of_thread = turn; }

int thread_turn() { return turn_of_thread; }

namespace {

constexpr std::string_view kPhase = "phase";

/// The thread's CPU clock for a span, 0 on meta: nothing is computed there, and the system call
/// takes longer than an op's shapes.
int64_t span_cpu_ns(const Runtime& runtime) {
  return runtime.device() == Device::meta ? 0 : thread_cpu_ns();
}

/// Lanes in which a span is shown.
enum class Side : uint8_t { host, device };

/// What a click on the span shows, but for the last brace. Its rates are of the time that the work
/// took.
std::string span_args(const Tracer::Span& span, Side side) {
  const int64_t ns = side == Side::device ? span.device_end - span.device_begin
                     : span.on_device()   ? 0
                                          : span.end_ns - span.begin_ns;
  std::string args = fmt::format("{{\"step\": {}", span.step);
  const auto amount = [&](const char* what, int64_t count, const char* rate) {
    if (count == 0) return;
    fmt::format_to(std::back_inserter(args), ", \"{}\": {}", what, count);
    if (ns <= 0) return;  // 1 per nanosecond is 1 G per second
    fmt::format_to(std::back_inserter(args), ", \"{}\": {:.3f}", rate, double(count) / double(ns));
  };
  if (span.micro_batch >= 0) {
    fmt::format_to(std::back_inserter(args), ", \"micro_batch\": {}", span.micro_batch);
  }
  amount("flops", span.flops, "GFLOP/s");
  amount("bytes", span.bytes, "GB/s");
  return args;
}

/// "block 3", or the name alone.
std::string numbered(std::string_view name, int64_t number) {
  return number < 0 ? std::string(name) : fmt::format("{} {}", name, number);
}

/// The span in the device's lane of its turn. It could do all of it from `queued` on.
std::string device_event(const Tracer::Span& span, int rank, int64_t origin_ns) {
  return fmt::format(
      ",\n{{\"name\": \"{}\", \"cat\": \"device {}\", \"ph\": \"X\", \"pid\": {}, \"tid\": {}, "
      "\"ts\": {:.3f}, \"dur\": {:.3f}, \"args\": {}, \"queued\": {:.3f}}}}}",
      numbered(span.name, span.number), span.category, rank, kDeviceLane + span.turn,
      (span.device_begin - origin_ns) * 1e-3, (span.device_end - span.device_begin) * 1e-3,
      span_args(span, Side::device), (span.end_ns - origin_ns) * 1e-3);
}

/// A label of the process, which says how far the device's times can be trusted.
std::string clocks_event(const Marks::Clocks& clocks, int rank) {
  return fmt::format(
      ",\n{{\"name\": \"process_labels\", \"ph\": \"M\", \"pid\": {}, \"args\": {{\"labels\": "
      "\"device's clock: compared {} times to {:.1f} us, drift at most {:.1f} us\"}}}}",
      rank, clocks.comparisons, double(clocks.uncertainty_ns) * 1e-3,
      double(clocks.drift_ns) * 1e-3);
}

/// Gives times to what holds marks; neither, where one of them is not known.
void take_times(const Marks& marks, int64_t& begin, int64_t& end) {
  begin = marks.time_of(begin);
  end = marks.time_of(end);
  if (begin < 0 || end < 0) begin = end = -1;
}

void take_times(const Marks& marks, Tracer::Exchange& exchange) {
  for (Tracer::Exchange::DevicePart& part : exchange.device_parts) {
    take_times(marks, part.begin, part.end);
  }
  take_times(marks, exchange.device_wait_begin, exchange.device_wait_end);
}

}  // namespace

void Tracer::record(bool on) {
  if (on == std::exchange(recording_, on) || accelerator_ == nullptr) return;
  Marks& marks = accelerator_->marks();
  if (on) {
    timed_spans_ = spans_.size();
    timed_exchanges_ = exchanges_.size();
    return marks.begin();
  }
  marks.end();
  for (size_t i = timed_spans_; i < spans_.size(); ++i) {
    take_times(marks, spans_[i].device_begin, spans_[i].device_end);
  }
  for (size_t i = timed_exchanges_; i < exchanges_.size(); ++i) take_times(marks, exchanges_[i]);
}

void Tracer::set_step(int64_t step) {
  step_ = step;
  if (recording_ && accelerator_ != nullptr) accelerator_->marks().read();
}

void Tracer::add(Exchange exchange) {
  if (!recording_ && accelerator_ != nullptr) take_times(accelerator_->marks(), exchange);
  exchanges_.push_back(std::move(exchange));
}

int64_t Tracer::origin_ns() const {
  int64_t origin = INT64_MAX;
  for (const Span& span : spans_) origin = std::min(origin, span.begin_ns);
  return origin;
}

std::string Tracer::span_events(int rank, int64_t origin_ns) const {
  std::string events, on_device;
  bool takes_turns = false;
  for (const Span& span : spans_) {
    takes_turns |= span.turn > 0;
    fmt::format_to(
        std::back_inserter(events),
        ",\n{{\"name\": \"{}\", \"cat\": \"{}\", \"ph\": \"X\", \"pid\": {}, \"tid\": {}, "
        "\"ts\": {:.3f}, \"dur\": {:.3f}, \"tts\": {:.3f}, \"tdur\": {:.3f}, \"args\": {}}}}}",
        numbered(span.name, span.number), span.category, rank, span.turn,
        (span.begin_ns - origin_ns) * 1e-3, (span.end_ns - span.begin_ns) * 1e-3,
        span.cpu_begin_ns * 1e-3, (span.cpu_end_ns - span.cpu_begin_ns) * 1e-3,
        span_args(span, Side::host));
    if (span.on_device()) on_device += device_event(span, rank, origin_ns);
  }
  if (takes_turns) events += lane_name_event(rank, 1, "main, in turns");
  if (on_device.empty()) return events;
  if (takes_turns) on_device += lane_name_event(rank, kDeviceLane + 1, "device, in turns");
  return events + clocks_event(accelerator_->marks().clocks(), rank) +
         lane_name_event(rank, kDeviceLane, "device") + on_device;
}

void Tracer::write(const std::string& path, std::string_view chapter) const {
  if (!speaks_for_all()) return;
  const std::string facts = fmt::format(
      "{{\"format\": 1, \"origin\": \"measured\", \"chapter\": \"{}\", \"ranks\": 1, "
      "\"threads\": {}, \"cores\": {}, \"node_size\": 0, \"links\": null, \"host_link\": null, "
      "\"groups\": {{}}}}",
      chapter, num_threads(), available_cores());
  write_trace_file(path, facts,
                   {process_name_events(0), span_events(0, origin_ns()),
                    memory_events(Runtime::current().allocator(), 0, origin_ns())});
}

std::string memory_events(const Allocator& allocator, int rank, int64_t origin_ns) {
  std::string text;
  std::map<std::string_view, int64_t> buffers;  // live bytes
  const auto counter = [&](std::string_view title, std::string_view what, double us,
                           int64_t bytes) {
    fmt::format_to(std::back_inserter(text),
                   ",\n{{\"name\": \"{}\", \"ph\": \"C\", \"pid\": {}, \"ts\": {:.3f}, "
                   "\"args\": {{\"{}\": {}}}}}",
                   title, rank, us, what, bytes);
  };
  if (allocator.events().empty()) return text;
  for (int c = 0; c < kNumCategories; ++c) {
    counter("memory", name(Category(c)), 0, allocator.initial_bytes(Category(c)));
  }
  for (const Allocator::Event& event : allocator.events()) {
    const double us = std::max(0.0, double(event.nanoseconds - origin_ns) * 1e-3);
    const auto& [category, block, buffer] = event.tag;
    counter("memory", name(category), us, event.live_bytes);
    if (category != Category::communication || buffer.empty()) continue;
    counter("communication buffers", buffer, us, buffers[buffer] += event.bytes);
  }
  return text;
}

std::string process_name_events(int rank) {
  return fmt::format(
             ",\n{{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": {0}, "
             "\"args\": {{\"name\": \"rank {0}\"}}}}",
             rank) +
         lane_name_event(rank, 0, "main");
}

std::string lane_name_event(int rank, int lane, std::string_view name) {
  return fmt::format(
      ",\n{{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": {}, \"tid\": {}, "
      "\"args\": {{\"name\": \"{}\"}}}}",
      rank, lane, name);
}

void write_trace_file(const std::string& path, const std::string& other_data,
                      const std::vector<std::string>& events) {
  FileWriter file(path);
  file.write(fmt::format("{{\"displayTimeUnit\": \"ms\", \"otherData\": {},\n\"traceEvents\": [\n",
                         other_data));
  std::string_view separator = ",\n";
  for (std::string_view text : events) {
    if (text.empty()) continue;
    if (!separator.empty()) text.remove_prefix(separator.size());
    file.write(text);
    separator = {};
  }
  file.write(std::string_view("\n]}\n"));
  file.close();
}

TraceScope::TraceScope(std::string_view name, std::string_view category, Label label, int64_t flops,
                       int64_t bytes, bool on_device) {
  Runtime& runtime = Runtime::current();
  accelerator_ = runtime.accelerator();
  if (accelerator_ != nullptr) accelerator_->begin_range(numbered(name, label.number).c_str());
  const Tracer& tracer = runtime.tracer();
  if (!tracer.recording()) return;
  runtime_ = &runtime;
  const int64_t cpu_ns = span_cpu_ns(runtime);
  span_ = {name, category, clock_ns(), 0, cpu_ns, 0, double(flops), bytes, tracer.step()};
  span_.number = label.number;
  span_.micro_batch = label.micro_batch;
  span_.turn = thread_turn();
  if (accelerator_ != nullptr && on_device) span_.device_begin = accelerator_->marks().make();
}

TraceScope::TraceScope(std::string_view name, std::string_view category, int64_t flops,
                       int64_t bytes, bool on_device)
    : TraceScope(name, category, Label(), flops, bytes, on_device) {}

TraceScope::TraceScope(std::string_view name, Label label)
    : TraceScope(name, kPhase, label, /*flops=*/0, /*bytes=*/0, /*on_device=*/true) {
  if (runtime_ != nullptr) span_.flops = -runtime_->flops();  // the difference remains
  recorder_ = Runtime::current().recorder();
  if (recorder_ != nullptr) recorder_->begin_phase(name, label.number, label.micro_batch);
}

TraceScope::~TraceScope() {
  if (recorder_ != nullptr) recorder_->end_phase();
  if (accelerator_ != nullptr) accelerator_->end_range();
  if (runtime_ == nullptr) return;
  if (span_.on_device()) span_.device_end = accelerator_->marks().make();
  if (span_.device_end < 0) span_.device_begin = -1;  // recording has ended meanwhile
  span_.cpu_end_ns = span_cpu_ns(*runtime_);
  span_.end_ns = clock_ns();
  if (span_.category == kPhase) span_.flops += runtime_->flops();
  runtime_->tracer().add(span_);
}

}  // namespace usp
