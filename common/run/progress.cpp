#include "run/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "base/output.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

constexpr int64_t kTerminalIntervalNs = 100'000'000;
constexpr int64_t kLogIntervalNs = 5'000'000'000;

/// `line` cut to the width of the terminal: a line that wraps cannot be rewritten in place.
std::string fitted(std::string line) {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    line.resize(std::min<size_t>(line.size(), size.ws_col - 1));
  }
  return line;
}

}  // namespace

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

Progress::Progress(int64_t steps, int64_t done)
    : Progress(steps, done, isatty(STDOUT_FILENO) == 1) {}

Progress::Progress(int64_t steps, int64_t done, bool terminal)
    : steps_(steps),
      done_(done),
      terminal_(terminal),
      begin_ns_(clock_ns()),
      shown_ns_(begin_ns_ - kLogIntervalNs) {}

Progress::~Progress() {
  if (line_open_) write_output("\n");
}

void Progress::show(const StepMetrics& metrics) {
  if (metrics.has_val_loss) {
    val_loss_ = metrics.val_loss;
    val_step_ = metrics.step;
  }
  if (!speaks_for_all()) return;
  const int64_t now = clock_ns();
  const bool last = metrics.step == steps_;
  if (now - shown_ns_ < (terminal_ ? kTerminalIntervalNs : kLogIntervalNs) && !last) return;
  shown_ns_ = now;
  const std::string text = line(metrics, seconds_since(begin_ns_));
  clear_line();
  write_output(terminal_ ? fitted(text) : text + "\n");
  flush_output();
  line_open_ = terminal_;
}

std::string Progress::line(const StepMetrics& metrics, double elapsed) {
  const double done = double(metrics.step - done_) / double(steps_ - done_);
  std::string text = fmt::format("step {:>{}}/{}  loss {:.4f}", metrics.step,
                                 fmt::formatted_size("{}", steps_), steps_, metrics.loss);
  if (val_step_ == metrics.step) {
    text += fmt::format("  val {:.4f}", val_loss_);
  } else if (val_step_ > 0) {
    text += fmt::format("  val@{} {:.4f}", val_step_, val_loss_);
  }
  if (!terminal_) val_step_ = 0;  // that line stays, and the next need not say it again
  text += fmt::format("  grad norm {:.3f}  lr {:.2e}  {:.0f} tokens/s", metrics.grad_norm,
                      metrics.lr, metrics.tokens_per_s);
  if (metrics.mfu > 0) text += fmt::format("  MFU {}", utilisation_text(metrics.mfu));
  return text + fmt::format("  {} left", duration(elapsed * (1 - done) / done));
}

void Progress::say(const std::string& line) {
  if (!speaks_for_all()) return;
  clear_line();
  write_output(line + "\n");
  flush_output();
}

void Progress::clear_line() {
  if (line_open_) write_output("\r\033[K");
  line_open_ = false;
}

}  // namespace usp
