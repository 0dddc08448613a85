#include "trace.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>

#include "check.h"
#include "runtime.h"

namespace usp {

namespace {

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Tracer::write(const std::string& path, std::string_view process_name) const {
  if (!speaks_for_all()) return;
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "w"), &std::fclose);
  if (file == nullptr) fail("cannot write the trace to {}", path);
  fmt::print(file.get(), "{{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n");
  fmt::print(file.get(),
             "{{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": 0, \"tid\": 0, "
             "\"args\": {{\"name\": \"{}\"}}}}",
             process_name);
  int64_t origin = INT64_MAX;
  for (const Span& span : spans_) origin = std::min(origin, span.begin_ns);
  for (const Span& span : spans_) {
    fmt::print(file.get(),
               ",\n{{\"name\": \"{}\", \"cat\": \"{}\", \"ph\": \"X\", \"pid\": 0, \"tid\": 0, "
               "\"ts\": {:.3f}, \"dur\": {:.3f}, \"args\": {{\"step\": {}, \"flops\": {}, "
               "\"bytes\": {}}}}}",
               span.name, span.category, (span.begin_ns - origin) * 1e-3,
               (span.end_ns - span.begin_ns) * 1e-3, span.step, span.flops, span.bytes);
  }
  fmt::print(file.get(), "\n]}}\n");
  if (std::fflush(file.get()) != 0 || std::ferror(file.get()) != 0) {
    fail("writing the trace to {} failed: is the disk full?", path);
  }
}

TraceScope::TraceScope(std::string_view name, std::string_view category, int64_t flops,
                       int64_t bytes)
    : tracer_(nullptr) {
  Tracer& tracer = Runtime::current().tracer();
  if (!tracer.recording()) return;
  tracer_ = &tracer;
  span_ = {name, category, now_ns(), 0, flops, bytes, tracer.step()};
}

TraceScope::~TraceScope() {
  if (tracer_ == nullptr) return;
  span_.end_ns = now_ns();
  tracer_->add(span_);
}

}  // namespace usp
