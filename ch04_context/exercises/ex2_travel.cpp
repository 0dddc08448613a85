#include <functional>

#include "comm/communicator.h"
#include "judge/todo.h"
#include "tensor/ops.h"

namespace usp {

/// The gradient of this rank's keys, summed over all ranks of a ring, on which keys go round: in
/// step s a rank has those of rank - s, its own first. share(s) computes this rank's share of their
/// gradient, once for each step and in order. A rank sends to the next rank alone, a sum of shares
/// in each step but one.
Tensor travelling_gradients(const Communicator& ring,
                            const std::function<Tensor(int step)>& share) {
  const int n = ring.size(), rank = ring.rank();
  const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
  // Sends a tensor to the next rank and receives another from the one before.
  const auto pass_on = [&](const Tensor& sent, const Tensor& coming) {
    const SendRecv both[] = {{SendRecv::send, sent, next}, {SendRecv::recv, coming, previous}};
    return ring.send_recv_async(both);
  };
  const Tensor own = share(0);
  Tensor coming;
  Handle passing;
  // TODO (about 11 lines): share after share meets what the ranks before have added
  USP_TODO("ch04.ex2");
}

}  // namespace usp
