#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace usp {

/// Collects timed spans and writes them as Chrome trace events, which https://ui.perfetto.dev
/// opens. Off until record(true); an unrecorded span costs one branch.
class Tracer {
 public:
  /// One finished span. Names are string literals: they are stored as views.
  struct Span {
    std::string_view name;
    std::string_view category;  ///< "phase", "op", ...
    int64_t begin_ns;
    int64_t end_ns;
    int64_t flops;
    int64_t bytes;  ///< read and written, as the op's operands imply
    int64_t step;   ///< training step; -1 for none
  };

  void record(bool on) { recording_ = on; }
  bool recording() const { return recording_; }
  void set_step(int64_t step) { step_ = step; }
  int64_t step() const { return step_; }
  void add(const Span& span) { spans_.push_back(span); }
  const std::vector<Span>& spans() const { return spans_; }

  /// Writes all spans to `path`; throws Error if it cannot. `process_name` labels the lane.
  void write(const std::string& path, std::string_view process_name) const;

 private:
  bool recording_ = false;
  int64_t step_ = -1;
  std::vector<Span> spans_;
};

/// The span of its own lifetime, on the current runtime's tracer.
class TraceScope {
 public:
  explicit TraceScope(std::string_view name, std::string_view category = "phase", int64_t flops = 0,
                      int64_t bytes = 0);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Tracer* tracer_;  ///< nullptr when nothing is recorded
  Tracer::Span span_;
};

}  // namespace usp
