#include <nccl.h>

#include <cstdlib>
#include <functional>
#include <thread>

#include "catch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"

using namespace usp::emulator;
using test::Array;

namespace {

using Floats = std::vector<float>;

using Body = std::function<Floats(ncclComm_t, int, cudaStream_t)>;

/// Runs `body` as each of three ranks, in a thread each, and collects what they return.
std::vector<Floats> run_ranks(const Body& body) {
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
  return results;
}

/// The same, of ranks that make no mistake.
std::vector<Floats> on_ranks(const Body& body) {
  const std::vector<Floats> results = run_ranks(body);
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
  setenv("NCCL_RUNTIME_CONNECT", "0", /*replace=*/1);  // or its first collective waits for others
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  const auto results = on_ranks([&](ncclComm_t comm, int rank, cudaStream_t stream) {
    const Array<float> x(Floats{1.0f * rank});
    ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, stream);
    cudaStreamSynchronize(stream);
    ncclComm_t other;
    if (rank < 2) ncclCommInitRank(&other, 2, id, rank);
    if (rank == 1) ncclCommDestroy(other);
    if (rank == 0) {
      ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, other, stream);
      ncclCommAbort(other);
      cudaStreamSynchronize(stream);
    }
    return x.host();
  });
  REQUIRE(results == std::vector<Floats>(3, {3}));
}

TEST_CASE("what a rank contributes has to be written, unless the call is given up") {
  run_ranks([](ncclComm_t comm, int rank, cudaStream_t stream) {
    const Array<float> written(Floats{1}), unwritten(1), y(3);
    ncclAllGather(rank == 1 ? unwritten : written, y, 1, ncclFloat32, comm, stream);
    cudaStreamSynchronize(stream);
    return Floats();
  });
  const Report report = take_report();
  INFO(report.text());
  REQUIRE(report.problems.size() == 1);
  REQUIRE(report.has("uninitialised"));

  setenv("NCCL_RUNTIME_CONNECT", "0", /*replace=*/1);
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  on_ranks([&](ncclComm_t, int rank, cudaStream_t stream) {
    ncclComm_t pair;
    if (rank < 2) ncclCommInitRank(&pair, 2, id, rank);
    if (rank == 0) {
      const Array<float> unwritten(1), y(2);
      ncclAllGather(unwritten, y, 1, ncclFloat32, pair, stream);
      cudaStreamQuery(stream);  // lets it run as far as it gets alone
      ncclCommAbort(pair);
      cudaStreamSynchronize(stream);
    }
    if (rank == 1) ncclCommDestroy(pair);
    return Floats();
  });
}

TEST_CASE("a call never ends of which ranks say different things, until they give it up") {
  struct Case {
    size_t counts[2];
    ncclDataType_t types[2];
    ncclRedOp_t ops[2];
  };
  const std::vector<Case> cases = {{{1, 2}, {ncclFloat32, ncclFloat32}, {ncclSum, ncclSum}},
                                   {{1, 1}, {ncclFloat32, ncclInt32}, {ncclSum, ncclSum}},
                                   {{1, 1}, {ncclFloat32, ncclFloat32}, {ncclSum, ncclMax}}};
  for (const Case& each : cases) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    const auto results = on_ranks([&](ncclComm_t, int rank, cudaStream_t stream) {
      const Array<float> x(Floats{1.0f * rank, 5});
      ncclComm_t pair;
      if (rank < 2) {
        ncclCommInitRank(&pair, 2, id, rank);
        ncclAllReduce(x, x, each.counts[rank], each.types[rank], each.ops[rank], pair, stream);
      }
      cudaEvent_t over;
      cudaEventCreate(&over);
      cudaEventRecord(over, stream);
      bool ended = false;
      for (int i = 0; i < 50 && !ended; ++i) {  // each query lets something run
        ended = cudaEventQuery(over) == cudaSuccess;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (rank < 2) ncclCommAbort(pair);
      cudaStreamSynchronize(stream);
      cudaEventDestroy(over);
      return Floats{1.0f * ended, x.host()[1]};
    });
    REQUIRE(results == std::vector<Floats>{{0, 5}, {0, 5}, {1, 5}});
  }
}

TEST_CASE("a wait is no deadlock while another rank is at work, however long") {
  Options now;
  now.patience = 0.5;
  const Use use(now);
  const auto results = on_ranks([](ncclComm_t comm, int rank, cudaStream_t stream) {
    const Array<float> x(Floats{1.0f * rank}), y(1);
    for (int i = 0; rank == 1 && i < 10; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      cudaMemsetAsync(y, i, 4, stream);
    }
    ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, stream);
    cudaStreamSynchronize(stream);
    return x.host();
  });
  REQUIRE(results == std::vector<Floats>(3, {3}));
}

namespace {

/// What is found where two ranks, which have joined two communicators, each run a body of its own.
std::string deadlock_of(const std::function<void(int, ncclComm_t*, cudaStream_t*)>& body) {
  Options now;
  now.patience = 0.2;
  const Use use(now);
  ncclUniqueId ids[2];
  for (ncclUniqueId& id : ids) ncclGetUniqueId(&id);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ncclComm_t comms[2];
      cudaStream_t streams[2];
      for (int i : {0, 1}) {
        cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking);
        ncclCommInitRank(&comms[i], 2, ids[i], rank);
      }
      body(rank, comms, streams);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Report report = take_report();
  std::string text;
  for (const Problem& problem : report.problems) text += problem.kind + ": " + problem.detail;
  return text;
}

}  // namespace

TEST_CASE("the host waits where NCCL's does, and who waits for whom is named") {
  const Array<float> x(Floats{1, 2, 3, 4}), y(Floats{5, 6, 7, 8});
  const auto leave = [](ncclComm_t first, ncclComm_t second) {
    ncclCommDestroy(first);
    ncclCommDestroy(second);
  };
  const std::string waits = "deadlock: host threads wait for each other in NCCL: ";
  const auto has = [&](const std::string& text, const std::string& call) {
    CAPTURE(text);
    REQUIRE(text.starts_with(waits));
    REQUIRE(text.find(call + " by rank 0 of communicator ") != std::string::npos);
  };
  // Each sends in a communicator of its own, before it receives.
  const auto send_first = [&](int rank, ncclComm_t* comms, cudaStream_t* streams) {
    ncclSend(x, 1, ncclFloat32, 1 - rank, comms[rank], streams[0]);
    ncclRecv(y + rank, 1, ncclFloat32, 1 - rank, comms[1 - rank], streams[1]);
    leave(comms[1], comms[0]);
  };
  has(deadlock_of(send_first), "ncclSend to rank 1");
  REQUIRE(deadlock_of([&](int rank, ncclComm_t* comms, cudaStream_t* streams) {
            ncclGroupStart();
            ncclSend(x, 1, ncclFloat32, 1 - rank, comms[rank], streams[0]);
            ncclRecv(y + rank, 1, ncclFloat32, 1 - rank, comms[1 - rank], streams[1]);
            ncclGroupEnd();
            leave(comms[1], comms[0]);
          }).empty());
  // Once they are connected, the host waits for nobody.
  REQUIRE(deadlock_of([&](int rank, ncclComm_t* comms, cudaStream_t* streams) {
            for (int from : {0, 1}) {
              if (rank == from) ncclSend(x, 1, ncclFloat32, 1 - rank, comms[from], streams[from]);
              float* other = y + 2 + rank;
              if (rank != from) ncclRecv(other, 1, ncclFloat32, from, comms[from], streams[from]);
            }
            send_first(rank, comms, streams);
          }).empty());
  const auto reduce_crossed = [&](int rank, ncclComm_t* comms, cudaStream_t* streams) {
    for (int i : {rank, 1 - rank}) {
      float* value = x + 2 * rank + i;
      ncclAllReduce(value, value, 1, ncclFloat32, ncclSum, comms[i], streams[i]);
    }
    leave(comms[1], comms[0]);
  };
  unsetenv("NCCL_RUNTIME_CONNECT");
  has(deadlock_of(reduce_crossed), "ncclAllReduce");
  const auto leave_crossed = [&](int rank, ncclComm_t* comms, cudaStream_t*) {
    leave(comms[rank], comms[1 - rank]);
  };
  has(deadlock_of(leave_crossed), "ncclCommDestroy");
  has(deadlock_of([&](int rank, ncclComm_t* comms, cudaStream_t*) {
        rank == 0 ? leave(comms[1], comms[0]) : static_cast<void>(ncclCommDestroy(comms[1]));
      }),
      "ncclCommDestroy");
}

namespace {

/// Two ranks with two communicators, which they join, and call, in one order or the other.
class TwoGroups {
 public:
  TwoGroups() {
    for (ncclUniqueId& id : ids_) ncclGetUniqueId(&id);
  }

  /// Whether it went well. `joins_crossed`, `calls_crossed`: rank 1 begins with the second one.
  bool run(bool joins_crossed, bool calls_crossed) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back(
          [=, this] { run_rank(rank, joins_crossed && rank == 1, calls_crossed && rank == 1); });
    }
    for (std::thread& thread : threads) thread.join();
    const Report report = take_report();
    return report.problems.empty();
  }

 private:
  void run_rank(int rank, bool joins_crossed, bool calls_crossed) {
    ncclComm_t comms[2];
    cudaStream_t streams[2];
    for (int i : {0, 1}) {
      const int group = joins_crossed ? 1 - i : i;
      cudaStreamCreateWithFlags(&streams[group], cudaStreamNonBlocking);
      if (ncclCommInitRank(&comms[group], 2, ids_[group], rank) != ncclSuccess) return;
    }
    const Array<float> x(Floats{1}), y(Floats{2});
    for (int i : {0, 1}) {
      const int group = calls_crossed ? 1 - i : i;
      float* values = group == 0 ? x : y;
      ncclAllReduce(values, values, 1, ncclFloat32, ncclSum, comms[group], streams[group]);
    }
    for (int i : {0, 1}) cudaStreamSynchronize(streams[i]);
    for (int i : {0, 1}) {
      cudaStreamDestroy(streams[i]);
      ncclCommDestroy(comms[i]);
    }
  }

  ncclUniqueId ids_[2];
};

/// How many runs of some end in a deadlock.
int deadlocks(int runs, bool joins_crossed, bool calls_crossed) {
  int count = 0;
  for (int i = 0; i < runs; ++i) {
    Options now;
    now.streams = Order::shuffled;
    now.seed = i + 1;
    now.patience = 0.1;
    const Use use(now);
    count += !TwoGroups().run(joins_crossed, calls_crossed);
  }
  return count;
}

}  // namespace

TEST_CASE("ranks that join communicators, or call them, in crossing order are found out") {
  REQUIRE(deadlocks(2, true, false) == 2);
  unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  REQUIRE(deadlocks(20, false, false) > 0);  // though all call them in the same order
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*replace=*/1);
  REQUIRE(deadlocks(20, false, false) == 0);
  REQUIRE(deadlocks(2, false, true) == 2);
}
