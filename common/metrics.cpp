#include "metrics.h"

#include <cmath>

#include "check.h"
#include "runtime.h"

namespace usp {

namespace {

/// "weights": 1, "gradients": 2, ...
std::string peaks_by_category(const Allocator& allocator) {
  std::string text;
  for (int i = 0; i < kNumCategories; ++i) {
    const auto category = static_cast<Category>(i);
    text += fmt::format("{}\"{}\": {}", i == 0 ? "" : ", ", name(category),
                        allocator.peak_bytes(category));
  }
  return text;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::string& path, DType dtype)
    : path_(path), digits_(dtype == DType::f64 ? 17 : 9) {
  if (!speaks_for_all()) return;
  stream_.open(path);
  if (!stream_) fail("cannot open {}", path);
}

void MetricsWriter::write(const StepMetrics& metrics, Runtime& runtime) {
  if (!stream_.is_open()) return;
  std::string line = fmt::format(
      "{{\"step\": {}, \"loss\": {}, \"grad_norm\": {}, \"lr\": {}, \"tokens\": {}, "
      "\"step_ms\": {:.3f}, \"tokens_per_s\": {:.1f}, \"mfu\": {:.4f}, \"peak_bytes\": {{",
      metrics.step, json_number(metrics.loss, digits_), json_number(metrics.grad_norm, digits_),
      json_number(metrics.lr, 17), metrics.tokens, metrics.step_ms, metrics.tokens_per_s,
      metrics.mfu);
  line += peaks_by_category(runtime.allocator()) +
          "}, \"comm_bytes\": " + runtime.ledger().payload_json(written_);
  written_ = runtime.ledger();
  if (metrics.has_val_loss) {
    line += fmt::format(", \"val_loss\": {}", json_number(metrics.val_loss, digits_));
  }
  stream_ << line << "}\n" << std::flush;
  if (!stream_) fail("writing {} failed at step {}: is the disk full?", path_, metrics.step);
}

std::string memory_json(const Allocator& allocator) {
  std::string text = fmt::format(
      "{{\"peak_bytes\": {{{}, \"total\": {}}}, \"reserved_bytes\": {}, "
      "\"system_allocations\": {}, \"events\": [",
      peaks_by_category(allocator), allocator.peak_bytes(), allocator.reserved_bytes(),
      allocator.system_allocations());
  const char* separator = "\n";
  for (const Allocator::Event& event : allocator.events()) {
    text += fmt::format("{}[{}, {}, \"{}\"]", separator, event.nanoseconds, event.bytes,
                        name(event.category));
    separator = ",\n";
  }
  return text + "]}\n";
}

std::string json_number(double value, int digits) {
  if (std::isfinite(value)) return fmt::format("{:.{}g}", value, digits);
  if (std::isnan(value)) return "\"nan\"";  // whatever its sign
  return fmt::format("\"{}\"", value);      // "inf", "-inf"
}

}  // namespace usp
