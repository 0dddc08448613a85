#include "files/run_dir.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/output.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

namespace fs = std::filesystem;

constexpr const char* kRecord = "run.json";
constexpr const char* kRunFiles[] = {kRecord,       "metrics.jsonl", "trace.json", "memory.json",
                                     "ledger.json", "start.json",    "report.md",  "done"};
constexpr const char* kUnfinished = ".tmp";  // of a file that write() has not renamed yet
constexpr const char *kCheckpoints = "checkpoints", *kFlight = "flight", *kOldFlight = "flight.old";
/// Folders of an earlier run's files, beside where they lay: while they are put there, when all are
/// there, and when they are to be removed.
constexpr const char *kFilling = "previous.tmp", *kAside = "previous", *kRemoved = "previous.old";

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) entries.push_back(entry.path());
  return entries;
}

/// The files of the run that a directory holds. What lies there and is none of ours is not among
/// them.
std::vector<fs::path> own_entries(const fs::path& run_dir) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (const fs::path& path : entries_of(run_dir / kCheckpoints)) {
    if (is_checkpoint_name(path.filename().string())) entries.push_back(path);
  }
  for (const char* name : kRunFiles) {
    for (const char* end : {"", kUnfinished}) {
      const fs::path path = run_dir / (std::string(name) + end);
      if (fs::exists(fs::symlink_status(path, error))) entries.push_back(path);
    }
  }
  return entries;
}

bool has_checkpoint(const fs::path& run_dir) {
  return std::ranges::any_of(entries_of(run_dir / kCheckpoints), [](const fs::path& path) {
    return is_checkpoint_name(path.filename().string());
  });
}

/// The files of an earlier run that are not to come back.
void remove_replaced(const fs::path& run_dir) {
  std::error_code error;
  fs::remove_all(run_dir / kCheckpoints / kAside, error);
  for (const fs::path& path : entries_of(run_dir / kCheckpoints)) {
    if (is_unfinished_checkpoint_name(path.filename().string())) fs::remove_all(path, error);
  }
  fs::remove(run_dir / kCheckpoints, error);  // if it is empty
  fs::remove_all(run_dir / kRemoved, error);
}

/// Whether this process was started with SIGHUP ignored, as by nohup. UCX, below some MPIs, handles
/// the signal from the moment it is loaded, whatever it was (its issue 10742), so this looks before
/// any library does. No sanitizer is ready by then.
bool ignores_hang_up = false;
[[gnu::no_sanitize("address", "thread", "undefined")]] void note_hang_up(int, char**, char**) {
  struct {
    void (*handler)(int);
    unsigned long flags;
    void (*restorer)();
    unsigned long mask;
  } action{};
  syscall(SYS_rt_sigaction, SIGHUP, nullptr, &action, sizeof(action.mask));
  ignores_hang_up = action.handler == SIG_IGN;
}
[[gnu::section(".preinit_array"), gnu::used]] void (*const before_libraries)(int, char**,
                                                                             char**) = note_hang_up;

std::atomic<int> stop_signal = 0;
std::atomic<std::time_t> stop_time = 0;
std::atomic<bool> stops_for_lost_output = false;

/// `timeout` and some shells send a signal to the process and to its group: the same wish twice.
constexpr std::time_t kSameWishSeconds = 1;

extern "C" void on_stop_signal(int signal) {
  const std::time_t now = std::time(nullptr);
  // A terminal that is closed adds nothing to the wish that is there, but it explains lost output.
  // The kernel sends SIGXCPU once more with every second that is used.
  const bool adds_nothing = signal == SIGXCPU || (signal == SIGHUP && !stops_for_lost_output);
  if (adds_nothing && stop_signal != 0) return;
  if (signal != SIGHUP && stop_signal != 0 && now - stop_time > kSameWishSeconds) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  if (stop_signal == 0) stop_time = now;
  stop_signal = signal;
}

/// Output is lost. That is no second wish.
void stop_for_lost_output() {
  int none = 0;
  if (!stop_signal.compare_exchange_strong(none, SIGTERM)) return;
  stop_time = std::time(nullptr);
  stops_for_lost_output = true;
}

}  // namespace

void require_run(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error) && !fs::is_empty(path, error)) return;
  usage_error("resume: run_dir={} holds no run; start one without --resume", path);
}

RunDir::RunDir(const std::string& path, bool overwrite, bool resume)
    : path_(path), resumes_(resume) {
  if (!speaks_for_all()) return;
  std::error_code error;
  if (resume && overwrite) usage_error("resume and overwrite exclude each other; give one");
  const bool exists = fs::is_directory(path_, error);
  if (resume) require_run(path);
  if (!exists) made_ = fs::create_directories(path_, error);
  if (error) usage_error("run_dir={} cannot be created: {}", path, error.message());
  lock_ = std::make_unique<RunLock>(path);
  take_back();
  if (resume && !fs::exists(path_ / kRecord, error) && !has_checkpoint(path_)) {
    usage_error("resume: run_dir={} holds no run; start one without --resume", path);
  }
  if (!resume && !overwrite) check_free();
  // Of starts that came to nothing, the first has the records of the run that is here.
  if (!fs::exists(path_ / kOldFlight, error)) {
    fs::rename(path_ / kFlight, path_ / kOldFlight, error);
  }
  fs::remove_all(path_ / kFlight, error);
}

RunDir::~RunDir() {
  if (!lock_) return;
  std::error_code error;
  const bool replaces = aside_;
  if (aside_ && !first_step_done_) take_back();
  if (withdrawn_ && begun_ && !resumes_ && !replaces) {
    for (const fs::path& entry : own_entries(path_)) fs::remove_all(entry, error);
  }
  if (!withdrawn_) {  // the records of this run are what ./book why asks for
    fs::remove_all(path_ / kOldFlight, error);
    return;
  }
  fs::remove_all(path_ / kFlight, error);
  fs::rename(path_ / kOldFlight, path_ / kFlight, error);
  lock_.reset();
  if (made_) fs::remove(path_, error);  // if it is empty
}

/// Throws UsageError where the directory holds a run, or what may be part of one.
void RunDir::check_free() const {
  std::error_code error;
  const bool run = fs::exists(path_ / kRecord, error), checkpoint = has_checkpoint(path_);
  const char* resume = checkpoint ? "go on with it by --resume, " : "";
  if (run) {
    usage_error("run_dir={} holds a run; {}give another directory, or --overwrite", path_.string(),
                resume);
  }
  if (!fs::exists(path_ / kCheckpoints, error)) return;
  usage_error("run_dir={} holds {} and no run; {}give another directory, or --overwrite",
              path_.string(), kCheckpoints,
              checkpoint ? "go on with the newest by --resume, " : "");
}

void RunDir::begin() {
  if (!lock_) return;
  begun_ = true;
  if (resumes_) return remove("done");
  if (own_entries(path_).empty()) return;
  aside_ = true;
  put_aside();
}

void RunDir::put_aside() const {
  for (const fs::path& entry : own_entries(path_)) {
    const fs::path folder = entry.parent_path() / kFilling;
    std::error_code error;
    fs::create_directories(folder, error);
    if (!error) fs::rename(entry, folder / entry.filename(), error);
    if (error) usage_error("cannot put {} aside: {}", entry.string(), error.message());
  }
  // In one piece, with the folder of the run last: it says that all are aside.
  for (const fs::path& folder : {path_ / kCheckpoints, path_}) {
    if (fs::exists(folder / kFilling)) fs::rename(folder / kFilling, folder / kAside);
  }
}

void RunDir::first_step_is_done() {
  first_step_done_ = true;
  if (!lock_) return;
  std::error_code error;
  fs::remove_all(path_ / kOldFlight, error);
  if (resumes_) return;
  // What has this name does not come back.
  fs::rename(path_ / kAside, path_ / kRemoved, error);
  remove_replaced(path_);
  aside_ = false;
}

/// What a start has put aside that came to nothing; what an interrupted removal has left goes.
void RunDir::take_back() const {
  std::error_code error;
  if (fs::exists(path_ / kRemoved, error)) remove_replaced(path_);
  if (fs::exists(path_ / kAside, error)) {  // all of it, so what lies here is that start's own
    for (const fs::path& entry : own_entries(path_)) fs::remove_all(entry, error);
  }
  for (const fs::path& folder : {path_ / kCheckpoints, path_}) {
    for (const char* name : {kFilling, kAside}) {
      for (const fs::path& entry : entries_of(folder / name)) {
        fs::rename(entry, folder / entry.filename(), error);
      }
      fs::remove(folder / name, error);
    }
  }
}

void RunDir::remove(const std::string& name) const {
  std::error_code error;
  if (speaks_for_all()) fs::remove(path_ / name, error);
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
  const std::string aside = file(name) + kUnfinished;
  std::ofstream stream(aside, std::ios::binary);
  stream << text;
  stream.close();
  const int number = errno;
  std::error_code error;
  if (!stream) {
    fs::remove(aside, error);
    fail("writing {} failed: {}", file(name), std::strerror(number));
  }
  fs::rename(aside, path_ / name, error);
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
  for (const int request : kStopSignals) {
    sigaddset(&requests, request);
    const bool ignored = request == SIGHUP && ignores_hang_up;
    std::signal(request, ignored ? SIG_IGN : on_stop_signal);
  }
  outlive_output(stop_for_lost_output);
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
