#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "tensor/runtime.h"

/// What a rank may do with its memory once wait() has returned, and how large messages are cut, for
/// any engine. No Catch2 here: the same checks run on rank threads and as a program under mpiexec.
namespace usp::test {

/// 1 MiB of f64.
inline constexpr int64_t kCount = 1 << 17;

/// Element i of what a rank contributes: whole, so that sums are exact in any order.
inline double element(int rank, int64_t i) { return double((7 * i + 131 * rank) % 1009); }

/// An operation on tensors of 1 MiB a rank, and what it must give.
struct Exchange {
  std::string name;
  std::vector<Tensor> tensors;  ///< all that it touches, the output last
  std::function<Handle(const std::vector<Tensor>&)> start;
  std::function<double(int64_t)> expected;  ///< element i of the output
};

/// Every kind of operation that moves tensors, as this rank sees it.
inline std::vector<Exchange> all_exchanges(const Communicator& world) {
  const int n = world.size(), me = world.rank();
  const int next = (me + 1) % n, previous = (me + n - 1) % n;
  const auto own = [me](int64_t count) {
    std::vector<double> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = element(me, i);
    return Tensor::from_host(values, {count}, DType::f64);
  };
  const auto room = [](int64_t count) { return Tensor::zeros({count}, DType::f64); };
  const auto sum = [n](int64_t i) {
    double sum = 0;
    for (int rank = 0; rank < n; ++rank) sum += element(rank, i);
    return sum;
  };
  const auto parts = [](int64_t i) { return element(static_cast<int>(i / kCount), i % kCount); };
  using Tensors = std::vector<Tensor>;
  std::vector<Exchange> all;
  all.push_back({"all_reduce",
                 {own(kCount)},
                 [&](const Tensors& t) { return world.all_reduce_async(t[0]); },
                 sum});
  all.push_back({"reduce_scatter",
                 {own(n * kCount), room(kCount)},
                 [&](const Tensors& t) { return world.reduce_scatter_async(t[1], t[0]); },
                 [=](int64_t i) { return sum(me * kCount + i); }});
  all.push_back({"all_gather",
                 {own(kCount), room(n * kCount)},
                 [&](const Tensors& t) { return world.all_gather_async(t[1], t[0]); },
                 parts});
  for (int root : {0, n - 1}) {
    all.push_back({fmt::format("broadcast of rank {}", root),
                   {me == root ? own(kCount) : room(kCount)},
                   [&world, root](const Tensors& t) { return world.broadcast_async(t[0], root); },
                   [=](int64_t i) { return element(root, i); }});
  }
  all.push_back(
      {"all_to_all",
       {own(n * kCount), room(n * kCount)},
       [&](const Tensors& t) {
         const std::vector<int64_t> counts(world.size(), kCount);
         return world.all_to_all_v_async(t[1], t[0], counts, counts);
       },
       [=](int64_t i) { return element(static_cast<int>(i / kCount), me * kCount + i % kCount); }});
  all.push_back({"send and recv",
                 {own(kCount), room(kCount)},
                 [&world, next, previous](const Tensors& t) {
                   return world.send_recv_async(std::vector<SendRecv>{
                       {SendRecv::send, t[0], next}, {SendRecv::recv, t[1], previous}});
                 },
                 [=](int64_t i) { return element(previous, i); }});
  return all;
}

/// Every second rank overwrites all its tensors as soon as wait() has returned. Throws Error if one
/// of the others finds that in what it has received.
inline void check_overwriting(const Communicator& world) {
  for (int round = 0; round < 2; ++round) {
    const bool overwrites = (world.rank() + round) % 2 == 0;
    for (Exchange& exchange : all_exchanges(world)) {
      world.barrier();
      exchange.start(exchange.tensors).wait();
      if (overwrites) {
        for (const Tensor& tensor : exchange.tensors) {
          std::memset(tensor.address(), 0xFF, tensor.bytes());
        }
        continue;
      }
      const Tensor& output = exchange.tensors.back();
      for (int64_t i = 0; i < output.numel(); ++i) {
        const double found = output.data<double>()[i], expected = exchange.expected(i);
        USP_CHECK(
            found == expected,
            "{}: rank {} of {} has {} as element {}, not {}: memory was still being read when "
            "wait() returned",
            exchange.name, world.rank(), world.size(), found, i, expected);
      }
    }
  }
}

/// The same where sums, and what is handed to the transport, go in small pieces.
inline void check_overwriting_in_pieces(const Communicator& world) {
  world.engine().limit_scratch(200'000);
  world.engine().limit_pieces(300'000);
  check_overwriting(world);
  world.barrier();
  world.engine().limit_scratch(Engine::kScratchLimit);
  world.engine().limit_pieces(Engine::kPieceLimit);
}

/// Messages that are cut into pieces, the last of any size. Throws Error unless all of each
/// arrives, and nothing behind it.
inline void check_pieces(const Communicator& world) {
  constexpr int64_t kPiece = 20'000, kBehind = 2 * kPiece / 8;
  world.engine().limit_pieces(kPiece);
  for (int64_t count : {2049, 2499, 2500, 2501, 5000, 6250, 9999}) {
    for (int root = 0; root < world.size(); ++root) {
      const bool sends = world.rank() == root;
      const Tensor room = Tensor::zeros({count + kBehind}, DType::f64);
      double* values = room.data<double>();
      for (int64_t i = 0; i < count + kBehind; ++i) {
        values[i] = sends ? (i < count ? element(root, i) : -1) : -2;
      }
      world.broadcast(room.narrow(0, 0, count), root);
      for (int64_t i = 0; i < count + kBehind; ++i) {
        const double expected = i < count ? element(root, i) : sends ? -1 : -2;
        USP_CHECK(values[i] == expected, "element {} of {} that came in pieces is {}, not {}", i,
                  count, values[i], expected);
      }
    }
  }
  world.barrier();
  world.engine().limit_pieces(Engine::kPieceLimit);
}

}  // namespace usp::test
