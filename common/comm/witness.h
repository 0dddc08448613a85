#pragma once

#include <string>

namespace usp {

/// A child process that outlives this one by a moment and writes down when it died.
///
/// A rank that is killed cannot say so, and mpiexec kills the others within milliseconds: which of
/// them was the first, no flight record can tell. The witness waits at the other end of a socket,
/// which the kernel closes when this process is gone, however it went. It appends a line
/// {"rank": 2, "pid": 123, "time": t} to a file that all ranks' witnesses share, and exits; the
/// order of the lines is the order of the deaths.
class Witness {
 public:
  /// Forks. Must be made before anything starts a thread or opens a connection.
  Witness();
  /// The orderly end: there is nothing to witness.
  ~Witness();
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;

  /// From here on a death is written to this file, under this rank.
  void testify(int rank, const std::string& path);

 private:
  int socket_ = -1;
};

}  // namespace usp
