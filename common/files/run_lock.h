#pragma once

#include <string>

namespace usp {

/// The right to write into a run directory. The file `lock` in it says who has the right; what
/// counts is the kernel's lock on that file, which ends with its process, however that ends.
class RunLock {
 public:
  /// Throws UsageError, which names process and host, where another run has the right, and where
  /// the file cannot be written. A lock whose process is dead is taken over. Of a process on
  /// another machine nothing is known: its lock has to be removed by hand.
  explicit RunLock(const std::string& run_dir);
  ~RunLock();  ///< removes the file
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  bool open_file();

  std::string run_dir_, path_;
  int descriptor_ = -1;
};

}  // namespace usp
