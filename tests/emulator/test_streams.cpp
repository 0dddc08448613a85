#include <thread>

#include "catch.h"
#include "emulator/emulator.h"
#include "emulator/fair_mutex.h"
#include "emulator/kernels.h"

using namespace usp::emulator;
using test::Array;

TEST_CASE("a kernel adds what it was given") {
  std::vector<float> values(1000);
  for (int i = 0; i < 1000; ++i) values[i] = static_cast<float>(i);
  const Array<float> x(values), y(1000);
  REQUIRE(test::add(nullptr, 1000, x, 3, y) == cudaSuccess);
  const std::vector<float> sums = y.host();
  for (int i = 0; i < 1000; ++i) REQUIRE(sums[i] == i + 3);
}

TEST_CASE("a wait between streams that is missing gives wrong numbers in some order") {
  int wrong = 0;
  for (const bool with_event : {false, true}) {
    for (const Order order : {Order::forward, Order::reverse, Order::shuffled}) {
      Options now;
      now.streams = order;
      const Use use(now);
      cudaStream_t compute, comm;
      cudaEvent_t ready;
      REQUIRE(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking) == cudaSuccess);
      REQUIRE(cudaStreamCreateWithFlags(&comm, cudaStreamNonBlocking) == cudaSuccess);
      REQUIRE(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming) == cudaSuccess);
      const Array<float> x(std::vector<float>(100, 1)), y(std::vector<float>(100, 0)), z(100);
      REQUIRE(test::add(compute, 100, x, 1, y) == cudaSuccess);
      if (with_event) {
        REQUIRE(cudaEventRecord(ready, compute) == cudaSuccess);
        REQUIRE(cudaStreamWaitEvent(comm, ready) == cudaSuccess);
      }
      REQUIRE(test::add(comm, 100, y, 1, z) == cudaSuccess);
      cudaStreamSynchronize(comm);
      const bool right = z.host() == std::vector<float>(100, 3);
      const bool checked = !checked_kernels().empty();  // then it is found in every order
      REQUIRE(take_report().has("race") == (checked && !with_event));
      if (with_event) {
        REQUIRE(right);
      } else {
        wrong += !right;
      }
      REQUIRE(cudaEventDestroy(ready) == cudaSuccess);
      REQUIRE(cudaStreamDestroy(compute) == cudaSuccess);
      REQUIRE(cudaStreamDestroy(comm) == cudaSuccess);
    }
  }
  REQUIRE(wrong > 0);
}

TEST_CASE("a pinned buffer is read when the copy runs") {
  float* pinned;
  REQUIRE(cudaMallocHost(&pinned, 4) == cudaSuccess);
  const Array<float> x(1);
  *pinned = 1;
  REQUIRE(cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice) == cudaSuccess);
  *pinned = 2;  // too early
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  REQUIRE(x.host()[0] == 2);
  float pageable = 3;
  REQUIRE(cudaMemcpyAsync(x, &pageable, 4, cudaMemcpyHostToDevice) == cudaSuccess);
  pageable = 4;
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  REQUIRE(x.host()[0] == 3);
  REQUIRE(cudaFreeHost(pinned) == cudaSuccess);
}

TEST_CASE("the default stream waits for the others, and they for it") {
  for (const Order order : {Order::forward, Order::reverse, Order::shuffled}) {
    Options now;
    now.streams = order;
    const Use use(now);
    cudaStream_t stream;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    const Array<float> x(std::vector<float>(100, 1)), y(100), z(100);
    REQUIRE(test::add(stream, 100, x, 1, y) == cudaSuccess);
    REQUIRE(test::add(nullptr, 100, y, 1, z) == cudaSuccess);
    REQUIRE(test::add(stream, 100, z, 1, y) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    REQUIRE(y.host() == std::vector<float>(100, 4));
    REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
  }
}

TEST_CASE("nothing runs before something waits") {
  cudaStream_t stream;
  cudaEvent_t start, end;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  REQUIRE(cudaEventCreate(&start) == cudaSuccess);
  REQUIRE(cudaEventCreate(&end) == cudaSuccess);
  REQUIRE(cudaEventQuery(end) == cudaSuccess);  // never recorded
  int calls = 0;
  REQUIRE(cudaEventRecord(start, stream) == cudaSuccess);
  const auto called = [](void* data) {
    ++*static_cast<int*>(data);
    if (cudaMemset(nullptr, 0, 1) != cudaErrorNotPermitted) *static_cast<int*>(data) = -1;
  };
  REQUIRE(cudaLaunchHostFunc(stream, called, &calls) == cudaSuccess);
  REQUIRE(cudaEventRecord(end, stream) == cudaSuccess);
  REQUIRE(calls == 0);
  int queries = 0;
  while (cudaEventQuery(end) == cudaErrorNotReady) ++queries;
  REQUIRE(queries == 3);  // each runs one operation
  REQUIRE(calls == 1);
  float milliseconds;
  REQUIRE(cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess);
  REQUIRE(milliseconds == 0.002f);
  REQUIRE(cudaStreamQuery(stream) == cudaSuccess);
  REQUIRE(cudaEventDestroy(start) == cudaSuccess);
  REQUIRE(cudaEventDestroy(end) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
  cudaGetLastError();
}

TEST_CASE("who asks for the device first gets it first, and who has let it go asks last") {
  FairMutex device;
  std::vector<int> order;
  const auto take = [&](int who) {
    device.lock();
    device.lock();
    order.push_back(who);
    device.unlock();
    device.unlock();
  };
  device.lock();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back(take, i);
    while (device.asking() < i + 2) std::this_thread::yield();
  }
  device.unlock();
  take(4);
  for (std::thread& thread : threads) thread.join();
  REQUIRE(order == std::vector<int>{0, 1, 2, 3, 4});
}
