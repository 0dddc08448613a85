#pragma once

#include <cstdint>
#include <vector>

#include "tensor/dtype.h"

namespace usp {

/// One matrix product of the model: [m, k] times [k, n].
struct MatmulShape {
  int64_t m, n, k;
};

/// GFLOP/s of the matmul backend on these products, run one after the other on random data: the
/// fastest of several rounds that together take about `seconds`. Model FLOPs utilisation on a CPU
/// is a fraction of this rate.
double measure_matmul_gflops(DType dtype, const std::vector<MatmulShape>& shapes,
                             double seconds = 0.5);

}  // namespace usp
