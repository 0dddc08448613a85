#include "tensor_parallel/batch_halves.h"

#include <exception>
#include <thread>

namespace usp {

void Turns::run(const std::function<void()>& first, const std::function<void()>& second) {
  Runtime& runtime = Runtime::current();
  const Runtime::Scopes scopes = runtime.scopes();
  std::exception_ptr failures[2];
  const auto strand = [&](int number, const std::function<void()>& body) {
    const Runtime::Use use(runtime);
    set_thread_turn(number);
    begin(number);
    runtime.set_scopes(scopes);
    try {
      body();
    } catch (...) {
      failures[number] = std::current_exception();
    }
    end(number);
  };
  turn_ = 0;
  ended_[0] = ended_[1] = false;
  cpu_ns_ = thread_cpu_ns();
  std::thread other(strand, 1, second);
  strand(0, first);
  other.join();
  continue_thread_cpu_ns(cpu_ns_);
  runtime.set_scopes(scopes);
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

// [yield]
void Turns::yield() {
  std::unique_lock lock(mutex_);
  const int strand = turn_, other = 1 - strand;
  if (ended_[other]) return;
  Runtime& runtime = Runtime::current();
  const Runtime::Scopes scopes = runtime.scopes();  // which the other strand changes
  cpu_ns_ = thread_cpu_ns();
  turn_ = other;
  changed_.notify_one();
  wait_for_turn(lock, strand);
  runtime.set_scopes(scopes);
}
// [yield]

void Turns::begin(int strand) {
  std::unique_lock lock(mutex_);
  wait_for_turn(lock, strand);
}

void Turns::end(int strand) {
  const std::unique_lock lock(mutex_);
  ended_[strand] = true;
  cpu_ns_ = thread_cpu_ns();
  if (!ended_[1 - strand]) turn_ = 1 - strand;
  changed_.notify_one();
}

/// To a trace both strands are the rank's one program, whose clock they carry on.
void Turns::wait_for_turn(std::unique_lock<std::mutex>& lock, int strand) {
  changed_.wait(lock, [&] { return turn_ == strand; });
  continue_thread_cpu_ns(cpu_ns_);
}

}  // namespace usp
