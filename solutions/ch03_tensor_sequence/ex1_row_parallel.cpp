#include "comm/communicator.h"
#include "judge/todo.h"
#include "tensor/ops.h"

namespace usp {

/// y [T, O] = residual + x Wᵀ, whole on every rank of `tp`, for x [T, I] and W [O, I] of which a
/// rank has the same columns: x [T, I/t] and weight [O, I/t], t = number of ranks. The residual
/// [T, O] is whole and the same on every rank.
Tensor row_parallel_forward(const Communicator& tp, const Tensor& x, const Tensor& weight,
                            const Tensor& residual) {
  // SOLUTION BEGIN (about 4 lines): this rank's partial sum of y, the residual once, then the sum
  const Tensor y = Tensor::empty({x.size(0), weight.size(0)}, x.dtype());
  ops::linear_forward(y, x, weight);
  if (tp.rank() == 0) ops::add(y, y, residual);
  tp.all_reduce(y);
  return y;
  // SOLUTION END
}

}  // namespace usp
