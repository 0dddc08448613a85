#pragma once

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "tensor/dtype.h"

namespace usp {

/// One matrix product of the model: [m, k] times [k, n].
struct MatmulShape {
  int64_t m, n, k;
};

/// Multiplies by the largest of these weights [n, k], with enough rows that the matmul backend
/// divides the product over all threads, and compares with a plain loop. Throws UsageError where an
/// element was not computed, or a sample of them is not right to rounding.
void check_matmul(DType dtype, const std::vector<MatmulShape>& shapes);

/// GFLOP/s of the matmul backend on these products, run one after the other on random data, by all
/// ranks of `world` at the same time: the fastest of several rounds that together take about
/// `seconds`. A round lasts until the slowest rank is done, so ranks that share cores do not count
/// them twice. What a CPU reaches of this rate is its model FLOPs utilisation.
double measure_matmul_gflops(const Communicator& world, DType dtype,
                             const std::vector<MatmulShape>& shapes, double seconds);

}  // namespace usp
