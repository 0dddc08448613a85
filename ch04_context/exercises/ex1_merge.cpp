#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "judge/todo.h"
#include "tensor/ops.h"

namespace usp {

/// Attention of one row to some keys becomes attention to those keys and to others. `out` [D] is
/// the average of the values, weighted by softmax over the keys seen so far; `lse` is the log of
/// the sum of exp(scores) of these keys. part_out and part_lse are the same of the other keys.
/// Where a row sees no key, out is 0 and lse is -infinity.
void merge_row(std::span<double> out, double& lse, std::span<const double> part_out,
               double part_lse) {
  const int64_t D = std::ssize(out);
  // TODO (about 7 lines): the larger lse, the weight of each part, then out and lse
  USP_TODO("ch04.ex1");
}

}  // namespace usp
