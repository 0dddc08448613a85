#include "comm/algorithms.h"
#include "comm/communicator.h"
#include "judge/todo.h"
#include "tensor/ops.h"

namespace usp {

/// tensor = the sum over ranks, on a ring: every rank sends to the next rank, and receives from
/// the previous one, by send and recv alone. A rank sends 2 (n-1)/n of the tensor, n = number of
/// ranks.
void ring_all_reduce(const Communicator& comm, const Tensor& tensor) {
  const int n = comm.size(), rank = comm.rank();
  const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
  // Chunk `index` of n, counted around the ring: chunk(-1) is chunk(n - 1).
  const auto chunk = [&](int index) {
    const auto [begin, count] = algorithms::slice(tensor.numel(), n, (index + 2 * n) % n);
    return tensor.narrow(0, begin, count);
  };
  const Tensor arrived = Tensor::empty({chunk(0).numel()}, tensor.dtype());  // chunk 0 is longest

  // TODO (about 12 lines): first sum the chunks around the ring, then pass the sums on
  USP_TODO("ch02.ex1");
}

}  // namespace usp
