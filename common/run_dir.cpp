#include "run_dir.h"

#include <csignal>
#include <cstring>
#include <fstream>

#include "check.h"

namespace usp {

namespace {

constexpr const char* kRunFiles[] = {"run.json",    "metrics.jsonl", "trace.json", "memory.json",
                                     "ledger.json", "report.md",     "done"};

volatile std::sig_atomic_t stop_signal = 0;

extern "C" void on_stop_signal(int signal) {
  stop_signal = signal;
  std::signal(signal, SIG_DFL);
}

}  // namespace

RunDir::RunDir(const std::string& path, bool overwrite) : path_(path) {
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
  std::ofstream probe(path_ / "run.json");
  if (!probe) {
    usage_error("run_dir={} cannot be written to: {}", path, std::strerror(errno));
  }
}

void RunDir::write(const std::string& name, const std::string& text) const {
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
