#pragma once

#include <memory>
#include <optional>

#include "comm/transport.h"
#include "comm/witness.h"

namespace usp {

/// MPI in this process, from its start to its end. main makes this object first and destroys it
/// last.
class MpiProcess {
 public:
  /// Initialises MPI. Throws UsageError where the launcher has started more ranks than this
  /// process's MPI library can see: its mpiexec belongs to another MPI.
  MpiProcess(int* argc, char*** argv);
  ~MpiProcess();
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;

  /// The rank that the launcher gave this process, known before MPI is; 0 without a launcher.
  static int launched_rank();

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Ranks on this machine.
  int local_size() const { return local_size_; }

  /// The transport of this process's communication thread, which alone may call MPI as long as it
  /// lives.
  std::unique_ptr<Transport> make_transport();

  /// Where the witness writes down in which order ranks died: RUN_DIR/flight/deaths.jsonl.
  void testify(const std::string& path);

 private:
  void check_same_program();
  void meet_neighbours();

  std::optional<Witness> witness_;  ///< one on each machine, under a launcher
  int rank_ = 0, size_ = 1, local_size_ = 1;
};

}  // namespace usp
