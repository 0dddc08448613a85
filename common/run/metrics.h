#pragma once

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "tensor/allocator.h"
#include "tensor/dtype.h"
#include "tensor/ledger.h"

namespace usp {

class Runtime;

/// What is known of a step once it is over.
struct StepMetrics {
  int64_t step = 0;      ///< from 1; 0: none yet
  double loss = 0;       ///< mean over the step's target tokens, before its update; nats
  double grad_norm = 0;  ///< before clipping
  double lr = 0;
  int64_t tokens = 0;  ///< trained on since the run began, this step included
  double step_ms = 0;
  double tokens_per_s = 0;
  double needed_flops = 0;  ///< that the model asks for: of attention the pairs below the mask
  double book_flops = 0;    ///< the same as the book counts it, without a mask
  double flops = 0;         ///< that all ranks together carried out, recomputation included
  double mfu = 0;           ///< model FLOPs utilisation: of the peak, what was needed
  double book_mfu = 0;      ///< as the book counts
  double hfu = 0;           ///< hardware FLOPs utilisation: of the peak, what was carried out
  double val_loss = 0;      ///< after the update; where measured
  bool has_val_loss = false;
  std::string further;  ///< more members of its JSON object, such as "\"depth\": 3"

  /// No update was made, for want of a finite gradient.
  bool skipped() const { return !std::isfinite(grad_norm); }
  /// Fills time and speed of a step of this many tokens, which began then and ends now.
  void took(int64_t begin_ns, int64_t tokens_of_step);
  /// Fills the utilisations: operations / time / peak. 0: leaves them out.
  void relate_to(double peak_gflops);
};

/// Steps whose update was left out: how many, and the first of them. However long a run is, at most
/// `kMost` stretches of neighboring steps are kept.
class SkippedSteps {
 public:
  static constexpr size_t kMost = 32;

  void add(int64_t step);  ///< later than all before
  int64_t count() const { return count_; }
  /// "3 of 40, the gradient was not finite: steps 3 and 7 to 8"; there has to be one.
  std::string text(int64_t steps) const;

 private:
  struct Stretch {
    int64_t first, last;
  };

  int64_t count_ = 0;
  std::vector<Stretch> stretches_;
  int64_t further_from_ = 0;  ///< the first step that is counted alone; 0: all are kept
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
  /// Steps of the whole run whose update was left out.
  const SkippedSteps& skipped() const { return skipped_; }

  /// Throws Error if writing fails (a full disk). Adds the allocator's peaks since they were reset,
  /// and what the ledger counted since the last call.
  void write(const StepMetrics& metrics, Runtime& runtime);

 private:
  void cut(int64_t kept_steps);

  std::string path_;
  std::ofstream stream_;
  StepMetrics last_;
  SkippedSteps skipped_;
  Ledger written_;
  int digits_;
};

/// "66 %"; above 100 no number, but why that can be: the peak was measured too low.
std::string utilisation_text(double utilisation);

/// A number as a JSON value: `digits` significant digits, or "nan", "inf", "-inf" in quotes.
std::string json_number(double value, int digits);

}  // namespace usp
