#include "run_dir.h"

#include <csignal>
#include <cstring>
#include <ctime>
#include <fstream>

#include "check.h"
#include "runtime.h"

namespace usp {

namespace {

constexpr const char* kRunFiles[] = {"run.json",    "metrics.jsonl", "trace.json", "memory.json",
                                     "ledger.json", "report.md",     "done"};

volatile std::sig_atomic_t stop_signal = 0;
volatile std::time_t stop_time = 0;

/// `timeout` and some shells send a signal to the process and to its group: the same wish twice.
constexpr std::time_t kSameWishSeconds = 1;

extern "C" void on_stop_signal(int signal) {
  const std::time_t now = std::time(nullptr);
  if (stop_signal != 0 && now - stop_time > kSameWishSeconds) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  if (stop_signal == 0) stop_time = now;
  stop_signal = signal;
}

}  // namespace

RunDir::RunDir(const std::string& path, bool overwrite) : path_(path) {
  if (!speaks_for_all()) return;
  if (std::filesystem::exists(path_ / "run.json") && !overwrite) {
    usage_error("run_dir={} holds a run; give another directory, or --overwrite", path);
  }
  std::error_code error;
  std::filesystem::create_directories(path_, error);
  if (error) usage_error("run_dir={} cannot be created: {}", path, error.message());
  for (const char* name : kRunFiles) {
    std::filesystem::remove(path_ / name, error);
    if (error) usage_error("run_dir={}: cannot remove {}: {}", path, name, error.message());
  }
  std::filesystem::remove_all(path_ / "flight", error);
  // Not run.json: that would claim a run if this start failed further on.
  const std::filesystem::path probe = path_ / "metrics.jsonl";
  if (!std::ofstream(probe)) {
    usage_error("run_dir={} cannot be written to: {}", path, std::strerror(errno));
  }
  std::filesystem::remove(probe, error);
}

void RunDir::write(const std::string& name, const std::string& text) const {
  if (!speaks_for_all()) return;
  std::ofstream stream(path_ / name, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream) fail("writing {} failed: {}", file(name), std::strerror(errno));
}

void install_stop_handlers() {
  std::signal(SIGINT, on_stop_signal);
  std::signal(SIGTERM, on_stop_signal);
}

bool stop_requested() { return stop_signal != 0; }

}  // namespace usp
