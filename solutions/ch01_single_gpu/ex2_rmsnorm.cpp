#include <cmath>
#include <span>

#include "judge/todo.h"

namespace usp {

/// dx [H], the gradient of the loss at x [H], for one token of y = x * rstd * weight with
/// rstd = 1 / sqrt(mean(x²) + eps). Given are dy [H], the gradient at y, and rstd of the forward
/// pass.
void rmsnorm_backward(std::span<double> dx, std::span<const double> dy, std::span<const double> x,
                      std::span<const double> weight, double rstd) {
  const int64_t H = std::ssize(x);

  // SOLUTION BEGIN (about 5 lines): rstd depends on every channel of x, too
  double along = 0;  // of dy * weight, what lies along x
  for (int64_t h = 0; h < H; ++h) along += dy[h] * weight[h] * x[h];
  along *= rstd * rstd * rstd / double(H);
  for (int64_t h = 0; h < H; ++h) dx[h] = dy[h] * weight[h] * rstd - x[h] * along;
  // SOLUTION END
}

}  // namespace usp
