#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dtype.h"

namespace usp {

/// One matrix product of the model: [m, k] times [k, n].
struct MatmulShape {
  int64_t m, n, k;
};

std::string cpu_name();          ///< such as "AMD EPYC 7763"
std::string instruction_sets();  ///< the vector extensions this CPU has, such as "avx2 fma"
int available_cores();           ///< cores this process may run on
std::string build_commit();      ///< git commit of the sources, "-dirty" appended if edited
std::string compiler();
std::string build_architecture();  ///< the compiler's instruction-set flags
std::string matmul_library();      ///< name, version and instruction set in use
/// Several lines for --version: commit, compiler, instruction sets of build and CPU, library.
std::string build_report();

/// GFLOP/s of the matmul backend on these products, run one after the other on random data: the
/// fastest of several rounds that together take about `seconds`. Model FLOPs utilisation on a CPU
/// refers to it.
double measure_matmul_gflops(DType dtype, const std::vector<MatmulShape>& shapes,
                             double seconds = 0.5);

}  // namespace usp
