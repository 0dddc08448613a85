#include "memory_in_flight.h"

#include <exception>
#include <map>
#include <thread>

#include "base/threads.h"
#include "comm/launch.h"
#include "comm/threads_transport.h"
#include "testing.h"

namespace usp::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// A transport that lets large messages lie for a while before it takes them.
class SlowReader : public ThreadsTransport {
 public:
  SlowReader(ThreadsFabric& fabric, int rank, milliseconds delay)
      : ThreadsTransport(fabric, rank), delay_(delay) {}

  Request receive(int rank, int64_t tag, void* data, int64_t capacity) override {
    const Request request = ThreadsTransport::receive(rank, tag, data, capacity);
    if (capacity > kLarge) taken_from_[request.id] = Clock::now() + delay_;
    return request;
  }
  bool test(Request& request) override {
    const auto found = taken_from_.find(request.id);
    const bool lies = !request.done && found != taken_from_.end() && Clock::now() < found->second;
    return !lies && ThreadsTransport::test(request);
  }
  // Nobody rings at the moment when a message has lain long enough.
  bool rings() const override { return false; }

 private:
  static constexpr int64_t kLarge = 18 << 10;  // more than a header and what travels with it

  milliseconds delay_;
  std::map<uint64_t, Clock::time_point> taken_from_;  ///< by request
};

/// run_threads(), with every second rank a slow reader, beginning with `first`.
void run_with_slow_readers(int ranks, int first,
                           const std::function<void(const Communicator&)>& body) {
  constexpr std::chrono::seconds kTimeout{60};
  ThreadsFabric fabric(ranks);
  std::vector<std::exception_ptr> failures(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      set_num_threads(1);
      SlowReader transport(fabric, rank, milliseconds(rank % 2 == first ? 5 : 0));
      Runtime runtime(Device::cpu, rank);
      const Runtime::Use use(runtime);
      QueueEngine engine(transport);
      engine.set_timeout(kTimeout);
      try {
        body(Communicator::world(engine));
        engine.leave(kTimeout);
      } catch (const PeerFailed&) {
        return;  // the peer says why
      } catch (const std::exception& error) {
        failures[rank] = std::current_exception();
        engine.fail_run(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

TEST_CASE("nobody reads a rank's memory any more when wait() has returned") {
  for (int ranks : kSanitized ? std::vector{3} : std::vector{2, 3, 4}) {
    CAPTURE(ranks);
    run_threads(ranks, check_overwriting);
    for (int first : {0, 1}) run_with_slow_readers(ranks, first, check_overwriting);
  }
}

TEST_CASE("nobody reads a rank's memory after wait(), however an operation is cut") {
  run_with_slow_readers(3, 1, check_overwriting_in_pieces);
}

TEST_CASE("a message that is too large for one piece arrives whole, and nothing behind it") {
  for (int ranks : {2, 3}) run_threads(ranks, check_pieces);
}

}  // namespace
}  // namespace usp::test
