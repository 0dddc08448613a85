#include <exception>
#include <thread>

#include "base/threads.h"
#include "comm/launch.h"
#include "comm/threads_transport.h"
#include "tensor/runtime.h"

namespace usp {

namespace {

/// One rank, from start to end. `failure` is what its body threw, if not on account of a peer.
void run_rank(ThreadsFabric& fabric, int rank, double timeout, Device device,
              const std::function<void(const Communicator&)>& body, std::exception_ptr& failure) {
  set_num_threads(1);
  ThreadsTransport transport(fabric, rank);
  Runtime runtime(device, rank);
  const Runtime::Use use(runtime);
  QueueEngine engine(transport);
  engine.set_timeout(std::chrono::duration<double>(timeout));
  try {
    body(Communicator::world(engine));
    if (engine.leave(std::chrono::duration<double>(timeout))) engine.leave_devices();
  } catch (const PeerFailed&) {
    return;
  } catch (const std::exception& error) {
    failure = std::current_exception();
    engine.fail_run(error.what());
    return;
  }
}

}  // namespace

void run_threads(int ranks, const std::function<void(const Communicator&)>& body,
                 double timeout_seconds, Device device) {
  ThreadsFabric fabric(ranks);
  std::vector<std::exception_ptr> failures(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back(
        [&, rank] { run_rank(fabric, rank, timeout_seconds, device, body, failures[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace usp
