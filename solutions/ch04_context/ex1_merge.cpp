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
  // SOLUTION BEGIN (about 7 lines): the larger lse, the weight of each part, then out and lse
  const double largest = std::max(lse, part_lse);
  if (largest == -std::numeric_limits<double>::infinity()) return;  // no key so far
  const double own = std::exp(lse - largest), other = std::exp(part_lse - largest);
  const double sum = own + other;
  for (int64_t d = 0; d < D; ++d) out[d] = (own * out[d] + other * part_out[d]) / sum;
  lse = largest + std::log(sum);
  // SOLUTION END
}

}  // namespace usp
