#include <nccl.h>

#include <functional>
#include <thread>

#include "catch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"

using namespace usp::emulator;
using test::Array;

namespace {

using Floats = std::vector<float>;

/// Runs `body` as each of three ranks, in a thread each, and collects what they return.
std::vector<Floats> on_ranks(const std::function<Floats(ncclComm_t, int, cudaStream_t)>& body) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  std::vector<Floats> results(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      ncclComm_t comm;
      if (ncclCommInitRank(&comm, 3, id, rank) != ncclSuccess) return;
      cudaStream_t stream;  // the default stream is the same for all ranks
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      results[rank] = body(comm, rank, stream);
      cudaStreamDestroy(stream);
      ncclCommDestroy(comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Report report = take_report();
  INFO(report.text());
  REQUIRE(report.problems.empty());
  return results;
}

}  // namespace

TEST_CASE("ranks that are threads reduce, gather and send") {
  for (const Order order : {Order::forward, Order::reverse, Order::shuffled}) {
    Options now;
    now.streams = order;
    const Use use(now);
    const auto reduced = on_ranks([](ncclComm_t comm, int rank, cudaStream_t stream) {
      const Array<float> x(Floats{1.0f * rank, 10});
      ncclAllReduce(x, x, 2, ncclFloat32, ncclSum, comm, stream);
      cudaStreamSynchronize(stream);
      return x.host();
    });
    REQUIRE(reduced == std::vector<Floats>(3, {3, 30}));
    const auto gathered = on_ranks([](ncclComm_t comm, int rank, cudaStream_t stream) {
      const Array<float> x(Floats{1.0f * rank}), y(3);
      ncclAllGather(x, y, 1, ncclFloat32, comm, stream);
      cudaStreamSynchronize(stream);
      return y.host();
    });
    REQUIRE(gathered == std::vector<Floats>(3, {0, 1, 2}));
    const auto scattered = on_ranks([](ncclComm_t comm, int rank, cudaStream_t stream) {
      const Array<float> x(Floats{1, 2, 1.0f * rank}), y(1);
      ncclReduceScatter(x, y, 1, ncclFloat32, ncclAvg, comm, stream);
      cudaStreamSynchronize(stream);
      return y.host();
    });
    REQUIRE(scattered == std::vector<Floats>{{1}, {2}, {1}});
    const auto sent = on_ranks([](ncclComm_t comm, int rank, cudaStream_t stream) {
      const Array<float> x(Floats{1.0f * rank}), y(1);
      ncclGroupStart();
      ncclSend(x, 1, ncclFloat32, (rank + 1) % 3, comm, stream);
      ncclRecv(y, 1, ncclFloat32, (rank + 2) % 3, comm, stream);
      ncclGroupEnd();
      ncclBroadcast(x, x, 1, ncclFloat32, 2, comm, stream);
      cudaStreamSynchronize(stream);
      return Floats{y.host()[0], x.host()[0]};
    });
    REQUIRE(sent == std::vector<Floats>{{2, 2}, {0, 2}, {1, 2}});
  }
}

TEST_CASE("a rank that gives a communicator up waits no longer, and changes nothing any more") {
  const auto results = on_ranks([](ncclComm_t comm, int rank, cudaStream_t stream) {
    const Array<float> x(Floats{1.0f * rank});
    ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, stream);
    cudaStreamSynchronize(stream);
    if (rank == 0) {
      ncclUniqueId id;
      ncclGetUniqueId(&id);
      ncclComm_t other;
      ncclCommInitRank(&other, 2, id, 0);
      ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, other, stream);
      ncclCommAbort(other);
      cudaStreamSynchronize(stream);
    }
    return x.host();
  });
  REQUIRE(results == std::vector<Floats>(3, {3}));
}
