#include <cmath>

#include "judge/todo.h"

namespace usp {

/// What a row's sum of weights and its output are multiplied by when a tile of keys moves the
/// largest score seen so far from `before` to `now`. Both were summed with weights
/// exp(score - before). The largest score is -infinity as long as the row has seen no key.
double rescaling(double before, double now) {
  // TODO (about 2 lines): from one maximum to the other, and what if there is none
  USP_TODO("ch09.ex8");
}

}  // namespace usp
