#pragma once

#include <sys/types.h>

#include <string>

namespace usp {

/// A child process that writes down in which order the ranks of a machine died.
///
/// A rank that is killed cannot say so, and mpiexec kills the others within milliseconds. No flight
/// record can tell which rank was the first. So every rank keeps a connection to one process that
/// mpiexec does not know of. When a rank dies, the kernel closes this connection before the one by
/// which mpiexec learns of the death. The rank whose connection closes first has died first. For
/// each the witness appends a line {"rank": 2, "pid": 123, "time": t} to a file.
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
  /// Names the file to write to; any rank may call it.
  void testify(const std::string& path);

 private:
  void tell(const std::string& message);

  pid_t child_ = -1;
  int connection_ = -1;
};

}  // namespace usp
