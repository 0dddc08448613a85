#pragma once

#include <cstdint>
#include <string>

namespace usp {

std::string cpu_name();          ///< such as "AMD EPYC 7763"
std::string instruction_sets();  ///< the vector extensions this CPU has, such as "avx2 fma"
/// Cores this process may run on: those of its affinity mask, or fewer where the quota of a control
/// group (of a container, a batch job) is for fewer. `root` is where /proc and /sys lie.
int available_cores(const std::string& root = "");
/// Fixes the number of threads for kernels that are called from this thread: OMP_NUM_THREADS, or
/// what a rank has of the cores that `ranks` share, but no more than OpenMP starts when it is asked
/// for them. The matrix library divides its work over as many as it is told, and what a thread that
/// never came should have computed stays garbage. Where OpenMP starts fewer, and `speak`, a line on
/// stderr says so.
void settle_threads(int ranks, bool speak);
/// Bytes that new processes here can use without swapping: what the kernel calls available, or less
/// where a control group (of a container, a batch job) has less left. Pages of files, which the
/// kernel gives up on demand, count as left. `root` is where /proc and /sys lie.
int64_t available_memory(const std::string& root = "");
std::string build_commit();  ///< git commit of the sources, "-dirty" appended if edited
/// What was linked: a digest of the program's contents, in hexadecimal, that the linker has left in
/// it. Empty if it has not.
std::string build_id();
/// Whether the sources are exactly those of build_commit().
bool is_built_from_commit();
std::string compiler();            ///< name and version
std::string build_architecture();  ///< the compiler's instruction-set flags
std::string matmul_library();      ///< name, version and instruction set in use
/// Several lines for --version: commit, compiler, instruction sets of build and CPU, library.
std::string build_report();

}  // namespace usp
