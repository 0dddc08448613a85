#pragma once

#include "comm/algorithms.h"
#include "comm/communicator.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"

namespace usp {

/// tensor = the sum over ranks, by hand: every rank talks to its two neighbors on a ring only.
///
/// The tensor is cut into as many chunks as there are ranks, n. In n-1 steps each rank passes on a
/// chunk to which it has added its own values; after them, rank i holds the finished chunk
/// (i+1) mod n. n-1 more steps pass the finished chunks around. A rank sends 2 (n-1)/n of the
/// tensor. Playbook appendix A0, "Ring AllReduce".
inline void ring_all_reduce(const Communicator& comm, const Tensor& tensor) {
  const int n = comm.size(), rank = comm.rank();
  const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
  const auto chunk = [&](int index) {
    const auto [begin, count] = algorithms::slice(tensor.numel(), n, (index + 2 * n) % n);
    return tensor.narrow(0, begin, count);
  };
  const Tensor arrived = Tensor::empty({chunk(0).numel()}, tensor.dtype());

  // [ring]
  // Reduce-scatter: what comes from the previous rank is added to, and goes on to the next.
  for (int step = 0; step < n - 1; ++step) {
    const Tensor mine = chunk(rank - step - 1);
    const Tensor partial_sum = arrived.narrow(0, 0, mine.numel());
    Handle sent = comm.send_async(chunk(rank - step), next);
    comm.recv(partial_sum, previous);
    ops::add(mine, mine, partial_sum);
    sent.wait();
  }
  // All-gather: finished chunks take the place of unfinished ones.
  for (int step = 0; step < n - 1; ++step) {
    Handle sent = comm.send_async(chunk(rank + 1 - step), next);
    comm.recv(chunk(rank - step), previous);
    sent.wait();
  }
  // [ring]
}

// [reduce]
/// On `root`, tensor = the sum over ranks; elsewhere it stays as it is.
inline void reduce(const Communicator& comm, const Tensor& tensor, int root) {
  if (comm.rank() != root) return comm.send(tensor, root);
  const Tensor part = Tensor::empty(tensor.shape(), tensor.dtype());
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == root) continue;
    comm.recv(part, peer);
    ops::add(tensor, tensor, part);
  }
}
// [reduce]

/// On `root`, output [n, count] = every rank's input [count].
inline void gather(const Communicator& comm, const Tensor& output, const Tensor& input, int root) {
  if (comm.rank() != root) return comm.send(input, root);
  for (int peer = 0; peer < comm.size(); ++peer) {
    const Tensor row = output.narrow(0, peer, 1).view(input.shape());
    peer == root ? ops::copy(row, input) : comm.recv(row, peer);
  }
}

/// output [count] = row rank() of root's input [n, count].
inline void scatter(const Communicator& comm, const Tensor& output, const Tensor& input, int root) {
  if (comm.rank() != root) return comm.recv(output, root);
  for (int peer = 0; peer < comm.size(); ++peer) {
    const Tensor row = input.narrow(0, peer, 1).view(output.shape());
    peer == root ? ops::copy(output, row) : comm.send(row, peer);
  }
}

}  // namespace usp
