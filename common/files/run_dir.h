#pragma once

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "files/run_lock.h"

namespace usp {

/// Throws UsageError where nothing can be resumed in this directory: it is not there, or empty.
void require_run(const std::string& path);

/// The directory of a run and the files in it. A run is complete when `done` exists. As long as the
/// object lives, no other run may use the directory. Ranks other than 0 leave everything to rank
/// 0.
class RunDir {
 public:
  /// Creates the directory. Throws UsageError if it holds a run already and neither `overwrite` nor
  /// `resume` is given, if it cannot be written to, or if another run is at work in it. With
  /// `resume` it has to hold a run, or checkpoints of one. What it holds stays, until begin().
  RunDir(const std::string& path, bool overwrite, bool resume = false);
  /// Without first_step_is_done(), an earlier run's files lie there again as they were.
  ~RunDir();
  RunDir(const RunDir&) = delete;
  RunDir& operator=(const RunDir&) = delete;

  /// Nothing will refuse this run any more, so it takes the place of an earlier one, whose files
  /// are put aside. They come back where this run ends before its first step has, even by
  /// `kill -9`: then the next RunDir of this path finds them. A run that resumes keeps them.
  void begin();
  /// This run has been refused. It leaves the directory as it was.
  void withdraw() { withdrawn_ = true; }
  /// From here on this run is worth more than an earlier one, which is removed.
  void first_step_is_done();
  /// Whether an earlier run's files are aside.
  bool has_earlier_run() const { return aside_; }

  std::string file(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }
  bool resumes() const { return resumes_; }

  /// Writes a whole file, which replaces an older one of that name in one piece. Throws Error if
  /// that fails.
  void write(const std::string& name, const std::string& text) const;
  /// A file, if it is there; throws Error if that fails.
  void remove(const std::string& name) const;
  /// Brings a file, if it is there, to the disk; throws Error if that fails.
  void sync(const std::string& name) const;
  /// Writes `done`, whose one line says how the run ended.
  void finish(const std::string& how) const { write("done", how + "\n"); }

 private:
  void check_free() const;
  void put_aside() const;
  void take_back() const;

  std::filesystem::path path_;
  bool resumes_;
  bool made_ = false, begun_ = false, aside_ = false, first_step_done_ = false, withdrawn_ = false;
  std::unique_ptr<RunLock> lock_;
};

/// Whether a directory in `checkpoints` bears the name that checkpoints have: step-NNNNNNNN.
bool is_checkpoint_name(std::string_view name);
/// The same of one that is being written or removed: .tmp or .old.tmp follows.
bool is_unfinished_checkpoint_name(std::string_view name);

/// Ctrl-C, what a batch system sends, a terminal that is closed, and a limit of CPU time.
inline constexpr int kStopSignals[] = {SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU, SIGINT};

/// Turns these signals and output that is lost into a request that stop_requested() reports. One of
/// them again a moment later ends the process at once, but SIGHUP and SIGXCPU, which come more than
/// once by themselves, never do. A thread that does nothing else receives them: the calling thread
/// no longer does, nor do those that it starts afterwards.
void install_stop_handlers();
bool stop_requested();  ///< whether any of these has come
/// The one of kStopSignals that asked last; 0: none has.
int stop_signal_number();

}  // namespace usp
