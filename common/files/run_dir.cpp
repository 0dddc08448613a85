#include "files/run_dir.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <ctime>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/output.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

constexpr const char* kRunFiles[] = {"run.json",    "metrics.jsonl", "trace.json", "memory.json",
                                     "ledger.json", "report.md",     "done"};
constexpr const char* kCheckpoints = "checkpoints";

std::atomic<int> stop_signal = 0;
std::time_t stop_time = 0;  // of the handler alone

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

RunDir::RunDir(const std::string& path, bool overwrite, bool resume)
    : path_(path), resumes_(resume) {
  if (!speaks_for_all()) return;
  std::error_code error;
  if (resume && overwrite) usage_error("resume and overwrite exclude each other; give one");
  if (resume && !std::filesystem::exists(path_ / "run.json", error)) {
    usage_error("resume: run_dir={} holds no run; start one without --resume", path);
  }
  if (!resume) std::filesystem::create_directories(path_, error);
  if (error) usage_error("run_dir={} cannot be created: {}", path, error.message());
  lock_ = std::make_unique<RunLock>(path);
  if (!resume) start(overwrite);
  std::filesystem::remove_all(path_ / "flight", error);
}

void RunDir::start(bool overwrite) const {
  const std::string path = path_.string();
  std::error_code error;
  if (std::filesystem::exists(path_ / "run.json", error) && !overwrite) {
    usage_error("run_dir={} holds a run; give another directory, or --overwrite", path);
  }
  const std::filesystem::path checkpoints = path_ / kCheckpoints;
  if (std::filesystem::exists(checkpoints, error) && !overwrite) {
    usage_error("run_dir={} holds {} and no run; give another directory, or --overwrite", path,
                kCheckpoints);
  }
  for (const char* name : kRunFiles) {
    std::filesystem::remove_all(path_ / name, error);
    if (error) usage_error("run_dir={}: cannot remove {}: {}", path, name, error.message());
  }
  // What lies there and is none of ours stays.
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints, error)) {
    const std::string name = entry.path().filename().string();
    if (is_checkpoint_name(name) || is_unfinished_checkpoint_name(name)) {
      std::filesystem::remove_all(entry.path(), error);
    }
    if (error) usage_error("run_dir={}: cannot remove {}", path, entry.path().string());
  }
  std::filesystem::remove(checkpoints, error);  // if it is empty
  // Not run.json: that would claim a run if this start failed further on.
  const std::filesystem::path probe = path_ / "metrics.jsonl";
  if (!std::ofstream(probe)) {
    usage_error("run_dir={} cannot be written to: {}", path, std::strerror(errno));
  }
  std::filesystem::remove(probe, error);
}

void RunDir::remove(const std::string& name) const {
  std::error_code error;
  if (speaks_for_all()) std::filesystem::remove(path_ / name, error);
  if (error) fail("cannot remove {}: {}", file(name), error.message());
}

void RunDir::sync(const std::string& name) const {
  if (!speaks_for_all()) return;
  const int descriptor = open(file(name).c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0 && errno == ENOENT) return;
  const bool synced = descriptor >= 0 && fsync(descriptor) == 0;
  const int error = errno;
  if (descriptor >= 0) close(descriptor);
  if (!synced) fail("writing {} to the disk failed: {}", file(name), std::strerror(error));
}

void RunDir::write(const std::string& name, const std::string& text) const {
  if (!speaks_for_all()) return;
  // Aside first: whoever reads the file, or a run that is killed, finds all of it or the old one.
  const std::string aside = file(name) + ".tmp";
  std::ofstream stream(aside, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream) fail("writing {} failed: {}", file(name), std::strerror(errno));
  std::error_code error;
  std::filesystem::rename(aside, path_ / name, error);
  if (error) fail("writing {} failed: {}", file(name), error.message());
}

bool is_checkpoint_name(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return false;
  const std::string_view digits = name.substr(kPrefix.size());
  return digits.size() >= 8 && digits.size() <= 18 &&
         digits.find_first_not_of("0123456789") == std::string_view::npos;
}

bool is_unfinished_checkpoint_name(std::string_view name) {
  for (const std::string_view ending : {".old.tmp", ".tmp"}) {
    if (!name.ends_with(ending)) continue;
    return is_checkpoint_name(name.substr(0, name.size() - ending.size()));
  }
  return false;
}

void install_stop_handlers() {
  sigset_t requests;
  sigemptyset(&requests);
  sigaddset(&requests, SIGINT);
  sigaddset(&requests, SIGTERM);
  std::signal(SIGINT, on_stop_signal);
  std::signal(SIGTERM, on_stop_signal);
  outlive_reader();
  // This thread and those it starts compute. In products, oneDNN up to 3.11.1 lets their stack
  // pointer point into the heap (its issue 4845), where a handler would overwrite other memory.
  pthread_sigmask(SIG_BLOCK, &requests, nullptr);
  static std::once_flag listens;
  std::call_once(listens, [&] {
    std::thread([requests] {
      pthread_sigmask(SIG_UNBLOCK, &requests, nullptr);
      while (true) pause();
    }).detach();
  });
}

bool stop_requested() { return stop_signal != 0; }

int stop_signal_number() { return stop_signal; }

}  // namespace usp
