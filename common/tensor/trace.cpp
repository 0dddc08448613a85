#include "tensor/trace.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <map>

#include "base/check.h"
#include "base/file_writer.h"
#include "base/machine.h"
#include "base/threads.h"
#include "tensor/runtime.h"

namespace usp {

int64_t clock_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

thread_local int64_t cpu_ns_before = 0;  ///< of the threads whose clock this one carries on

}  // namespace

int64_t thread_cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return cpu_ns_before + int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void continue_thread_cpu_ns(int64_t ns) { cpu_ns_before += ns - thread_cpu_ns(); }

namespace {

constexpr std::string_view kPhase = "phase";

/// When its work was done.
struct Interval {
  int64_t begin_ns, end_ns;
};

Interval interval_of(const Tracer::Span& span) {
  if (span.device_begin < 0) return {span.begin_ns, span.end_ns};
  return {span.device_begin, span.device_end};
}

/// What a click on the span shows; times count from `origin_ns`.
std::string span_args(const Tracer::Span& span, int64_t origin_ns) {
  std::string args = fmt::format("{{\"step\": {}", span.step);
  const auto amount = [&](const char* what, int64_t count, const char* rate) {
    if (count == 0) return;
    fmt::format_to(std::back_inserter(args), ", \"{}\": {}", what, count);
    const int64_t ns = interval_of(span).end_ns - interval_of(span).begin_ns;
    if (ns <= 0) return;  // 1 per nanosecond is 1 G per second
    fmt::format_to(std::back_inserter(args), ", \"{}\": {:.3f}", rate, double(count) / double(ns));
  };
  if (span.micro_batch >= 0) {
    fmt::format_to(std::back_inserter(args), ", \"micro_batch\": {}", span.micro_batch);
  }
  amount("flops", span.flops, "GFLOP/s");
  amount("bytes", span.bytes, "GB/s");
  if (span.device_begin >= 0) {  // from when on the device could do all of it
    fmt::format_to(std::back_inserter(args), ", \"queued\": {:.3f}",
                   double(span.end_ns - origin_ns) * 1e-3);
  }
  return args + "}";
}

}  // namespace

void Tracer::record(bool on) {
  if (on == std::exchange(recording_, on) || accelerator_ == nullptr) return;
  if (on) return accelerator_->begin_marks();
  const std::vector<int64_t> times = accelerator_->end_marks();
  for (; timed_spans_ < spans_.size(); ++timed_spans_) {
    Span& span = spans_[timed_spans_];
    span.device_begin = times[span.device_begin];
    span.device_end = times[span.device_end];
  }
}

int64_t Tracer::origin_ns() const {
  int64_t origin = INT64_MAX;
  for (const Span& span : spans_) origin = std::min(origin, span.begin_ns);
  return origin;
}

std::string Tracer::span_events(int rank, int64_t origin_ns) const {
  std::string events;
  for (const Span& span : spans_) {
    const auto [begin_ns, end_ns] = interval_of(span);
    fmt::format_to(
        std::back_inserter(events),
        ",\n{{\"name\": \"{}{}\", \"cat\": \"{}\", \"ph\": \"X\", \"pid\": {}, \"tid\": 0, "
        "\"ts\": {:.3f}, \"dur\": {:.3f}, \"tts\": {:.3f}, \"tdur\": {:.3f}, \"args\": {}}}",
        span.name, span.number < 0 ? "" : fmt::format(" {}", span.number), span.category, rank,
        (begin_ns - origin_ns) * 1e-3, (end_ns - begin_ns) * 1e-3, span.cpu_begin_ns * 1e-3,
        (span.cpu_end_ns - span.cpu_begin_ns) * 1e-3, span_args(span, origin_ns));
  }
  return events;
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

TraceScope::TraceScope(std::string_view name, std::string_view category, int64_t flops,
                       int64_t bytes) {
  Runtime& runtime = Runtime::current();
  accelerator_ = runtime.accelerator();
  if (accelerator_ != nullptr) accelerator_->begin_range(name.data());
  const Tracer& tracer = runtime.tracer();
  if (!tracer.recording()) return;
  runtime_ = &runtime;
  span_ = {name, category, clock_ns(), 0, thread_cpu_ns(), 0, double(flops), bytes, tracer.step()};
  if (accelerator_ != nullptr) span_.device_begin = accelerator_->mark();
}

TraceScope::TraceScope(std::string_view name, Label label) : TraceScope(name, kPhase) {
  if (runtime_ == nullptr) return;
  span_.flops = -runtime_->flops();  // the difference remains
  span_.number = label.number;
  span_.micro_batch = label.micro_batch;
}

TraceScope::~TraceScope() {
  if (accelerator_ != nullptr) accelerator_->end_range();
  if (runtime_ == nullptr) return;
  if (accelerator_ != nullptr) {
    if (!runtime_->tracer().recording()) return;  // its first mark is gone
    span_.device_end = accelerator_->mark();
  }
  span_.cpu_end_ns = thread_cpu_ns();
  span_.end_ns = clock_ns();
  if (span_.category == kPhase) span_.flops += runtime_->flops();
  runtime_->tracer().add(span_);
}

}  // namespace usp
