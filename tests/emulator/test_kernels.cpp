#include <fstream>
#include <set>

#include "catch.h"
#include "emulator/emulator.h"
#include "emulator/kernels.h"

using namespace usp::emulator;
using test::Array;

namespace {

constexpr Order kOrders[] = {Order::forward, Order::reverse, Order::shuffled};

/// Lines of planted.cu that end in a comment with "bug: NAME".
std::set<int> lines_of(const std::string& name) {
  std::ifstream source(USP_PLANTED);
  std::set<int> lines;
  std::string line;
  for (int number = 1; std::getline(source, line); ++number) {
    const size_t at = line.find("bug: " + name);
    const size_t end = at + 5 + name.size();
    if (at != std::string::npos && (end == line.size() || line[end] == ',')) lines.insert(number);
  }
  REQUIRE(!lines.empty());
  return lines;
}

Report count(const std::function<void()>& run) {
  Options now;
  now.counters = true;
  const Use use(now);
  take_report();
  run();
  const Report report = take_report();
  INFO(report.text());
  REQUIRE(report.problems.empty());
  return report;
}

}  // namespace

TEST_CASE("every planted bug is reported with its kind and line, whatever the order of threads") {
  for (const Order order : kOrders) {
    Options now;
    now.threads = order;
    const Use use(now);
    for (const test::Case& bug : test::planted_bugs()) {
      bug.run();
      REQUIRE(cudaDeviceSynchronize() == cudaErrorLaunchFailure);
      const Report report = take_report();
      INFO(bug.name << " in order " << static_cast<int>(order) << "\n" << report.text());
      REQUIRE(report.has(bug.kind));
      const std::set<int> lines = lines_of(bug.name);
      for (const Problem& problem : report.problems) {
        REQUIRE(problem.file == "planted.cu");
        REQUIRE(lines.count(problem.line) == 1);
      }
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    }
  }
}

TEST_CASE("correct kernels are not suspected") {
  for (const Order order : kOrders) {
    Options now;
    now.threads = order;
    const Use use(now);
    for (const test::Case& correct : test::correct_kernels()) {
      correct.run();
      const Report report = take_report();
      INFO(correct.name << "\n" << report.text());
      REQUIRE(report.problems.empty());
    }
  }
}

TEST_CASE("kernels of two streams that nothing orders race, whatever the order of the streams") {
  struct Two {
    cudaStream_t first, second;
    float *x, *y, *z;
    cudaEvent_t event;
  };
  constexpr int kCount = 100;
  const auto add = [](cudaStream_t stream, const float* from, float* to) {
    REQUIRE(test::add(stream, kCount, from, 1, to) == cudaSuccess);
  };
  const auto hand_on = [](const Two& two, cudaStream_t from, cudaStream_t to) {
    REQUIRE(cudaEventRecord(two.event, from) == cudaSuccess);
    REQUIRE(cudaStreamWaitEvent(to, two.event) == cudaSuccess);
  };
  struct Pair {
    const char* name;
    bool race;
    std::function<void(const Two&)> run;
  };
  const Pair pairs[] = {
      {"both write", true,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         add(two.second, two.x, two.y);
       }},
      {"one reads", true,
       [&](const Two& two) {
         add(two.first, two.y, two.z);
         add(two.second, two.x, two.y);
       }},
      {"both read", false,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         add(two.second, two.x, two.z);
       }},
      {"an event orders them", false,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         hand_on(two, two.first, two.second);
         add(two.second, two.x, two.y);
       }},
      {"the event is recorded too early", true,
       [&](const Two& two) {
         hand_on(two, two.first, two.second);
         add(two.first, two.x, two.y);
         add(two.second, two.x, two.y);
       }},
      {"the event orders the other way", true,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         hand_on(two, two.second, two.first);
         add(two.second, two.x, two.y);
       }},
      {"one of two that read is waited for", true,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         add(two.second, two.x, two.z);
         hand_on(two, two.first, nullptr);
         cudaStream_t third;
         REQUIRE(cudaStreamCreateWithFlags(&third, cudaStreamNonBlocking) == cudaSuccess);
         REQUIRE(cudaStreamWaitEvent(third, two.event) == cudaSuccess);
         add(third, two.y, two.x);
         REQUIRE(cudaStreamDestroy(third) == cudaSuccess);
       }},
      {"both that read are waited for", false,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         add(two.second, two.x, two.z);
         hand_on(two, two.first, two.second);
         add(two.second, two.y, two.x);
       }},
      {"the host waits for the first", false,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         REQUIRE(cudaStreamSynchronize(two.first) == cudaSuccess);
         add(two.second, two.x, two.y);
       }},
      {"the host waits for the second", true,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         REQUIRE(cudaStreamSynchronize(two.second) == cudaSuccess);
         add(two.second, two.x, two.y);
       }},
      {"the host asks until the first is over", false,
       [&](const Two& two) {
         add(two.first, two.x, two.y);
         REQUIRE(cudaEventRecord(two.event, two.first) == cudaSuccess);
         while (cudaEventQuery(two.event) == cudaErrorNotReady) cudaGetLastError();
         add(two.second, two.x, two.y);
       }},
      {"the default stream waits, and streams that do not block it do not", true,
       [&](const Two& two) {
         add(nullptr, two.x, two.y);
         add(two.second, two.x, two.y);
       }},
  };
  for (const Order order : kOrders) {
    Options now;
    now.streams = order;
    const Use use(now);
    for (const Pair& pair : pairs) {
      const Array<float> x(std::vector<float>(kCount, 1)), y(std::vector<float>(kCount, 2)),
          z(kCount);
      Two two{{}, {}, x, y, z, {}};
      for (cudaStream_t* stream : {&two.first, &two.second}) {
        REQUIRE(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking) == cudaSuccess);
      }
      REQUIRE(cudaEventCreateWithFlags(&two.event, cudaEventDisableTiming) == cudaSuccess);
      pair.run(two);
      const Report report = take_report();
      INFO(pair.name << " in order " << static_cast<int>(order) << "\n" << report.text());
      REQUIRE(report.has("race") == pair.race);
      for (const Problem& problem : report.problems) {
        REQUIRE(problem.file == "simple.cu");
        REQUIRE(problem.detail.find("a kernel of another stream") != std::string::npos);
      }
      REQUIRE(cudaEventDestroy(two.event) == cudaSuccess);
      for (cudaStream_t stream : {two.first, two.second}) {
        REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
      }
    }
  }
}

TEST_CASE("the default stream and those that block it are in order without an event") {
  for (const Order order : kOrders) {
    Options now;
    now.streams = order;
    const Use use(now);
    cudaStream_t blocking;
    REQUIRE(cudaStreamCreate(&blocking) == cudaSuccess);
    const Array<float> x(std::vector<float>(100, 1)), y(100);
    for (cudaStream_t stream : {blocking, cudaStream_t{nullptr}, blocking}) {
      REQUIRE(test::add(stream, 100, x, 1, y) == cudaSuccess);
    }
    const Report report = take_report();
    INFO(report.text());
    REQUIRE(report.problems.empty());
    REQUIRE(cudaStreamDestroy(blocking) == cudaSuccess);
  }
}

TEST_CASE("a problem names the thread and the block") {
  const Array<float> x(std::vector<float>(100, 1)), y(70);
  REQUIRE(test::add(nullptr, 71, x, 1, y) == cudaSuccess);
  const Report report = take_report();
  REQUIRE(report.problems.size() == 1);
  REQUIRE(report.problems[0].text().find(
              "thread (70,0,0) of block (0,0,0): writes 4 bytes of global memory, byte 280 of a "
              "block of 280 bytes") != std::string::npos);
}

TEST_CASE("counters of copies are those of the textbook") {
  std::vector<float> values(256 * 256);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000);
  const Array<float> x(values), y(values.size());
  struct Expected {
    test::Copy how;
    double per_load, per_store;
    int64_t conflicts;
  };
  for (const Expected& expected :
       {Expected{test::Copy::by_column, 4, 4, 0}, Expected{test::Copy::by_row, 32, 32, 0},
        Expected{test::Copy::float4s, 16, 16, 0}, Expected{test::Copy::changed_float4s, 16, 16, 0},
        Expected{test::Copy::transpose_32, 4, 4, 2048 * 31},
        Expected{test::Copy::transpose_33, 4, 4, 0}}) {
    const Report report = count([&] { test::copy(expected.how, x, y); });
    INFO("copy " << static_cast<int>(expected.how));
    REQUIRE(report.total.sectors_per_load() == expected.per_load);
    REQUIRE(report.total.sectors_per_store() == expected.per_store);
    REQUIRE(report.total.bank_conflicts == expected.conflicts);
    REQUIRE(report.total.divergent_branches == 0);
    if (expected.how == test::Copy::by_column) {
      REQUIRE(y.host() == values);
      REQUIRE(report.total.sector_bytes() == 2 * 256 * 256 * 4);
    }
  }
}

TEST_CASE("a tiled product reads each operand n / 32 times, from shared memory without conflicts") {
  const int n = 64;
  const Array<float> a(std::vector<float>(n * n, 1)), b(std::vector<float>(n * n, 2)), c(n * n);
  const Report report = count([&] { test::matmul(n, a, b, c); });
  REQUIRE(c.host() == std::vector<float>(n * n, 2 * n));
  REQUIRE(report.total.sectors_per_load() == 4);
  REQUIRE(report.total.load_sectors * 32 == 2 * n * n * (n / 32) * 4);
  REQUIRE(report.total.bank_conflicts == 0);
  int64_t loads = 0;
  for (const auto& [line, counters] : report.lines) loads += counters.load_sectors;
  REQUIRE(loads == report.total.load_sectors);
  REQUIRE(report.lines.begin()->first.starts_with("simple.cu:"));
}

TEST_CASE("lanes that part and lanes that update one word are counted") {
  const Array<float> y(64);
  REQUIRE(count([&] { test::branch(true, y); }).total.divergent_branches == 2);
  REQUIRE(count([&] { test::branch(false, y); }).total.divergent_branches == 0);
  const Array<int> bins(std::vector<int>(4, 0));
  const Report report = count([&] { test::histogram(bins); });
  REQUIRE(report.total.atomic_requests == 1);
  REQUIRE(report.total.atomic_steps == 8);
  REQUIRE(bins.host() == std::vector<int>(4, 8));
}

TEST_CASE("three turns have every order of threads") {
  for (const uint64_t turn : {0, 1, 7}) {
    REQUIRE(std::set{order_of(turn), order_of(turn + 1), order_of(turn + 2)}.size() == 3);
  }
}

TEST_CASE("in every order of threads a kernel finds the same memory, and leaves the same") {
  Options now;
  now.every_order = true;
  const Use use(now);
  const Array<int> bins(std::vector<int>(4, 0)), last(std::vector<int>(1, -1)), fresh(4);
  test::histogram(bins);
  Report report = take_report();
  INFO(report.text());
  REQUIRE(report.problems.empty());
  REQUIRE(bins.host() == std::vector<int>(4, 8));
  test::last_one(last);
  report = take_report();
  REQUIRE(report.problems.size() == 1);
  REQUIRE(report.problems[0].text().starts_with("order at simple.cu:"));
  // Again, of other memory: once, with all checks.
  test::histogram(fresh);
  report = take_report();
  REQUIRE(report.problems.size() == 1);
  REQUIRE(report.has("uninitialised"));
}

TEST_CASE("kernels that were checked are listed with how many grids and blocks they had") {
  const Array<float> x(std::vector<float>(9000, 1)), y(9000);
  const auto shapes = [] {
    int64_t all = 0;
    for (const auto& [kernel, shapes] : checked_kernels()) all += shapes;
    return all;
  };
  test::add(nullptr, 9000, x, 1, y);
  take_report();
  const int64_t before = shapes();
  for (int n : {8999, 8000, 7950}) test::add(nullptr, n, x, 1, y);
  REQUIRE(take_report().problems.empty());
  REQUIRE(shapes() == before + 1);  // 8000 and 7950 take 63 blocks of 128 threads
  Options now;
  now.checks = false;
  const Use use(now);
  test::add(nullptr, 7000, x, 1, y);
  take_report();
  REQUIRE(shapes() == before + 1);
  for (const auto& [kernel, count] : checked_kernels()) {
    INFO(kernel);
    REQUIRE((kernel.starts_with("simple.cu:") || kernel.starts_with("planted.cu:")));
  }
  REQUIRE(checked_kernels().at("simple.cu:add_kernel") >= 2);
}
