#include <cmath>

#include "judge/todo.h"
#include "tensor/ops.h"

namespace usp {

/// One update of a weight by AdamW. m and v are the running means of its gradient and of its
/// gradient's square, 0 before the first update; settings.step is 1 in that one. Loshchilov &
/// Hutter (2019), https://arxiv.org/abs/1711.05101.
void adamw_update(double& weight, double& m, double& v, double grad,
                  const AdamWSettings& settings) {
  // TODO (about 6 lines): moments, their bias, the step, the decay
  USP_TODO("ch01.ex3");
}

}  // namespace usp
