#include <cmath>

#include "judge/todo.h"
#include "tensor/ops.h"

namespace usp {

/// One update of a weight by AdamW. m and v are the running means of its gradient and of its
/// gradient's square, 0 before the first update; settings.step is 1 in that one. Loshchilov &
/// Hutter (2019), https://arxiv.org/abs/1711.05101.
void adamw_update(double& weight, double& m, double& v, double grad,
                  const AdamWSettings& settings) {
  // SOLUTION BEGIN (about 6 lines): moments, their bias, the step, the decay
  m = settings.beta1 * m + (1 - settings.beta1) * grad;
  v = settings.beta2 * v + (1 - settings.beta2) * grad * grad;
  const double mean = m / (1 - std::pow(settings.beta1, settings.step));
  const double variance = v / (1 - std::pow(settings.beta2, settings.step));
  weight -= settings.lr * settings.weight_decay * weight;
  weight -= settings.lr * mean / (std::sqrt(variance) + settings.eps);
  // SOLUTION END
}

}  // namespace usp
