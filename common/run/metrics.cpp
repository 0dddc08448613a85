#include "run/metrics.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/clock.h"
#include "base/file_writer.h"
#include "tensor/console.h"
#include "tensor/launches.h"
#include "tensor/memory_profile.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// A number as json_number() writes it.
double number(const nlohmann::ordered_json& json) {
  return json.is_string() ? std::strtod(json.get_ref<const std::string&>().c_str(), nullptr)
                          : json.get<double>();
}

void read_metrics(const nlohmann::ordered_json& json, StepMetrics& metrics) {
  metrics.step = json.at("step");
  metrics.loss = number(json.at("loss"));
  metrics.grad_norm = number(json.at("grad_norm"));
  metrics.lr = number(json.at("lr"));
  metrics.tokens = json.at("tokens");
  metrics.step_ms = number(json.at("step_ms"));
  metrics.tokens_per_s = number(json.at("tokens_per_s"));
  metrics.mfu = number(json.at("mfu"));
  metrics.hfu = number(json.at("hfu"));
  metrics.book_mfu = number(json.at("book_mfu"));
  metrics.flops = number(json.at("flops"));
  if (json.contains("val_loss")) {
    metrics.val_loss = number(json["val_loss"]);
    metrics.has_val_loss = true;
  }
}

}  // namespace

void StepMetrics::took(int64_t begin_ns, int64_t tokens_of_step) {
  const double seconds = seconds_since(begin_ns);
  step_ms = 1e3 * seconds;
  tokens_per_s = double(tokens_of_step) / seconds;
}

void StepMetrics::relate_to(double peak_gflops) {
  if (peak_gflops <= 0) return;
  const double possible = peak_gflops * 1e9 * step_ms * 1e-3;  // operations in the step's time
  mfu = needed_flops / possible;
  book_mfu = book_flops / possible;
  hfu = flops / possible;
}

void SkippedSteps::add(int64_t step) {
  ++count_;
  if (further_from_ > 0) return;
  if (!stretches_.empty() && stretches_.back().last + 1 == step) {
    stretches_.back().last = step;
  } else if (stretches_.size() < kMost) {
    stretches_.push_back({step, step});
  } else {
    further_from_ = step;
  }
}

std::string SkippedSteps::text(int64_t steps) const {
  std::string text;
  for (const Stretch& of : stretches_) {
    const bool is_last = &of == &stretches_.back() && further_from_ == 0;
    text += &of == &stretches_.front() ? "" : is_last ? " and " : ", ";
    text += fmt::format("{}", of.first);
    if (of.last > of.first) text += fmt::format(" to {}", of.last);
  }
  if (further_from_ > 0) text += fmt::format(" and more from {} on", further_from_);
  return fmt::format("{} of {}, the gradient was not finite: step{} {}", count_, steps,
                     count_ == 1 ? "" : "s", text);
}

MetricsWriter::MetricsWriter(const std::string& path, DType dtype, int64_t kept_steps)
    : path_(path), digits_(dtype == DType::f64 ? 17 : 9) {
  if (kept_steps > 0) cut(kept_steps);
  if (!speaks_for_all()) return;
  stream_.open(path, kept_steps > 0 ? std::ios::app : std::ios::trunc);
  if (!stream_) fail("cannot open {}", path);
}

/// Every rank reads; rank 0 replaces the file, by one that is whole at every moment.
void MetricsWriter::cut(int64_t kept_steps) {
  std::ifstream input(path_);
  std::string line, kept;
  while (std::getline(input, line)) {
    const auto json = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number()) break;
    if (json["step"].get<double>() > double(kept_steps)) break;
    try {
      read_metrics(json, last_);
    } catch (const nlohmann::json::exception&) {
      break;  // a damaged line
    }
    if (last_.skipped()) skipped_.add(last_.step);
    kept += line + "\n";
  }
  if (last_.step < kept_steps) {
    print("{} ends after {} of {} steps; the others are missing there, and nothing else.\n", path_,
          last_.step, kept_steps);
  }
  last_.step = kept_steps;
  if (!speaks_for_all()) return;
  FileWriter aside(path_ + ".tmp");
  aside.write(kept);
  aside.finish();
  std::error_code error;
  std::filesystem::rename(aside.path(), path_, error);
  if (error) fail("writing {} failed: {}", path_, error.message());
  sync_directory(std::filesystem::path(path_).parent_path());
}

void MetricsWriter::write(const StepMetrics& metrics, Runtime& runtime) {
  if (metrics.skipped()) skipped_.add(metrics.step);
  if (!stream_.is_open()) return;
  std::string line = fmt::format(
      "{{\"step\": {}, \"loss\": {}, \"grad_norm\": {}, \"lr\": {}, \"tokens\": {}, "
      "\"step_ms\": {:.3f}, \"tokens_per_s\": {:.6g}, \"mfu\": {:.6g}, "
      "\"book_mfu\": {:.6g}, \"hfu\": {:.6g}, \"flops\": {:.0f}, \"skipped\": {}, "
      "\"peak_bytes\": {{",
      metrics.step, json_number(metrics.loss, digits_), json_number(metrics.grad_norm, digits_),
      json_number(metrics.lr, 17), metrics.tokens, metrics.step_ms, metrics.tokens_per_s,
      metrics.mfu, metrics.book_mfu, metrics.hfu, metrics.flops, metrics.skipped());
  const Allocator& allocator = runtime.allocator();
  line += by_category([&](Category category) { return allocator.peak_bytes(category); }) +
          fmt::format("}}, \"system_allocations\": {}, \"comm_bytes\": ",
                      allocator.system_allocations()) +
          runtime.ledger().payload_json(written_);
  written_ = runtime.ledger();
  if (const Accelerator* accelerator = runtime.accelerator()) {
    line += fmt::format(", \"host_waits\": {}, \"launches\": {}", accelerator->waits(), launches);
  }
  if (metrics.has_val_loss) {
    line += fmt::format(", \"val_loss\": {}", json_number(metrics.val_loss, digits_));
  }
  if (!metrics.further.empty()) line += ", " + metrics.further;
  stream_ << line << "}\n" << std::flush;
  if (!stream_) fail("writing {} failed at step {}: is the disk full?", path_, metrics.step);
}

std::string utilisation_text(double utilisation) {
  if (utilisation > 1) return "over 100 % (the peak was measured at a busy moment)";
  return fmt::format("{:.0f} %", 100 * utilisation);
}

std::string json_number(double value, int digits) {
  if (std::isfinite(value)) return fmt::format("{:.{}g}", value, digits);
  if (std::isnan(value)) return "\"nan\"";  // whatever its sign
  return fmt::format("\"{}\"", value);      // "inf", "-inf"
}

}  // namespace usp
