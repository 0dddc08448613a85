#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "files/run_lock.h"

namespace usp {

/// The directory of a run and the files in it. A run is complete when `done` exists. As long as the
/// object lives, no other run may use the directory. Ranks other than 0 leave everything to rank
/// 0.
class RunDir {
 public:
  /// Creates the directory. Throws UsageError if it holds a run already and `overwrite` is false
  /// (otherwise that run's files are removed), if it cannot be written to, or if another run is at
  /// work in it. With `resume` it has to hold a run, whose files stay.
  RunDir(const std::string& path, bool overwrite, bool resume = false);

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
  void start(bool overwrite) const;

  std::filesystem::path path_;
  bool resumes_;
  std::unique_ptr<RunLock> lock_;
};

/// Whether a directory in `checkpoints` bears the name that checkpoints have: step-NNNNNNNN.
bool is_checkpoint_name(std::string_view name);
/// The same of one that is being written or removed: .tmp or .old.tmp follows.
bool is_unfinished_checkpoint_name(std::string_view name);

/// Turns Ctrl-C (SIGINT), SIGTERM and the end of who reads standard output into a request that
/// stop_requested() reports. Ctrl-C or SIGTERM again a moment later ends the process at once.
/// A thread that does nothing else receives them: the calling thread no longer does, nor do those
/// that it starts afterwards.
void install_stop_handlers();
bool stop_requested();  ///< whether any of these has come
/// SIGINT or SIGTERM, whichever asked last; 0: neither has.
int stop_signal_number();

}  // namespace usp
