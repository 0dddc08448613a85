#pragma once

#include <sys/types.h>

#include <string>

namespace usp {

/// A child process that writes down in which order the ranks of a machine died.
///
/// A rank that is killed cannot say so, and mpiexec kills the others within milliseconds: which of
/// them was the first, no flight record can tell. So every rank keeps a connection to one process
/// that mpiexec knows nothing of. The kernel closes it when the rank dies, before the connection
/// by which mpiexec learns of the death; what the witness sees closed first died first. It appends
/// a line {"rank": 2, "pid": 123, "time": t} for each to a file.
class Witness {
 public:
  /// Forks. Must be made before anything starts a thread or opens a connection.
  Witness();
  /// The orderly end of this rank.
  ~Witness();
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;

  /// Connects this rank to the witness that process `parent` has made, and dismisses its own if
  /// that is another one.
  void join(pid_t parent, int rank);
  /// Where to write: any rank may say it.
  void testify(const std::string& path);

 private:
  void tell(const std::string& message);

  pid_t child_ = -1;
  int connection_ = -1;
};

}  // namespace usp
