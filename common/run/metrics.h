#pragma once

#include <fstream>
#include <string>

#include "tensor/allocator.h"
#include "tensor/dtype.h"
#include "tensor/ledger.h"

namespace usp {

class Runtime;

/// What is known of a step once it is over.
struct StepMetrics {
  int64_t step = -1;     ///< from 0; -1: none yet
  double loss = 0;       ///< mean over the step's target tokens, before its update; nats
  double grad_norm = 0;  ///< before clipping
  double lr = 0;
  int64_t tokens = 0;  ///< trained on since the run began, this step included
  double step_ms = 0;
  double tokens_per_s = 0;
  double mfu = 0;       ///< model FLOPs utilisation, 0 to 1
  double hfu = 0;       ///< hardware FLOPs utilisation: the same with what was recomputed
  double flops = 0;     ///< that this rank carried out, recomputation included
  double val_loss = 0;  ///< after the update; where measured
  bool has_val_loss = false;
};

/// metrics.jsonl: one JSON object a line and step, on disk before the next step begins. A value
/// that is not finite becomes a string such as "nan"; losses carry enough digits to compare runs
/// bit for bit.
class MetricsWriter {
 public:
  /// Throws Error if the file cannot be opened. `dtype` sets the digits: 17 for f64, else 9. Where
  /// a run is resumed, the lines of its first `kept_steps` steps stay.
  MetricsWriter(const std::string& path, DType dtype, int64_t kept_steps = 0);

  /// What the file says of the last step that was kept; val_loss is that of the last validation.
  const StepMetrics& last() const { return last_; }

  /// Throws Error if writing fails (a full disk). Adds the allocator's peaks since they were reset,
  /// and what the ledger counted since the last call.
  void write(const StepMetrics& metrics, Runtime& runtime);

 private:
  void cut(int64_t kept_steps);

  std::string path_;
  std::ofstream stream_;
  StepMetrics last_;
  Ledger written_;
  int digits_;
};

/// A number as a JSON value: `digits` significant digits, or "nan", "inf", "-inf" in quotes.
std::string json_number(double value, int digits);

}  // namespace usp
