#include "run/timeline.h"

#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "comm/launch.h"
#include "tensor/ops.h"
#include "tensor/runtime.h"
#include "testing.h"
#include "trace_format.h"
#include "work_clock.h"

/// One trace of all ranks.
namespace usp::test {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;

constexpr int64_t kMillisecond = 1'000'000;

/// Runs `body` on so many ranks with their tracers on; returns the trace.
Json trace_of(int ranks, const std::function<void(const Communicator&)>& body,
              const std::function<std::optional<int64_t>(int)>& clock_offset = nullptr,
              WaitingTime* waiting = nullptr) {
  const TempDir dir;
  run_threads(ranks, [&](const Communicator& world) {
    const RunDir run_dir(dir.file("run"), /*overwrite=*/false);
    world.barrier();
    Tracer& tracer = Runtime::current().tracer();
    tracer.record(true);
    body(world);
    tracer.record(false);
    Connection connection;
    connection.ranks = world.size();
    const WaitingTime found =
        write_timeline(world, connection, run_dir, "a_chapter", 100,
                       clock_offset ? clock_offset(world.rank()) : std::nullopt);
    if (waiting != nullptr && world.rank() == 0) *waiting = found;
    world.barrier();
  });
  return read_trace(dir.file("run/trace.json"));
}

std::vector<Json> events(const Json& trace, const std::string& category, int rank) {
  std::vector<Json> found;
  for (const Json& event : trace["traceEvents"]) {
    if (event.value("cat", "") == category && event["pid"] == rank && event["ph"] == "X") {
      found.push_back(event);
    }
  }
  return found;
}

TEST_CASE("the trace has every rank's spans, operations and waits") {
  const Json trace = trace_of(3, [](const Communicator& world) {
    const TraceScope step("train_step");
    const Communicator pair = world.split("pair", [](int rank) { return rank / 2; });
    Runtime::current().tracer().set_step(4);
    pair.all_reduce(Tensor::zeros({100}, DType::f32));
    world.barrier();
  });
  const Json& facts = trace["otherData"];
  REQUIRE(facts["format"] == 1);
  REQUIRE(facts["ranks"] == 3);
  REQUIRE(facts["global_batch_tokens"] == 100);
  std::set<std::string> names;
  for (const auto& [id, group] : facts["groups"].items()) names.insert(group["name"]);
  REQUIRE(names == std::set<std::string>{"world", "pair"});
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    REQUIRE(events(trace, "phase", rank).size() == 1);
    const std::vector<Json> comm = events(trace, "comm", rank), wait = events(trace, "wait", rank);
    REQUIRE(comm.size() == wait.size());
    REQUIRE(comm.size() == (rank < 2 ? 3 : 2));  // split, and the barrier; a group of one is silent
    for (const Json& event : comm) {
      REQUIRE(event["tid"] > 0);
      REQUIRE(event["args"]["submitted"] <= event["ts"].get<double>() + 0.001);
      if (event["args"]["dimension"] != "pair") continue;
      REQUIRE(event["args"]["payload_bytes"] == 400);
      REQUIRE(event["args"]["wire_bytes"] == 400);
      REQUIRE(event["args"]["step"] == 4);
    }
    for (const Json& event : wait) REQUIRE(event["tid"] == 0);
  }
}

TEST_CASE("the parts of a split do not wait for one another") {
  const Json trace = trace_of(4, [](const Communicator& world) {
    const Communicator pair = world.split("pair", [](int rank) { return rank / 2; });
    world.barrier();
    if (world.rank() >= 2) std::this_thread::sleep_for(milliseconds(500));
    pair.all_reduce(Tensor::zeros({4}, DType::f32));
  });
  for (const auto& [id, group] : trace["otherData"]["groups"].items()) {
    if (group["name"] == "pair") REQUIRE(group["members"] == Json({{0, 1}, {2, 3}}));
    if (group["name"] == "world") REQUIRE(group["members"] == Json({{0, 1, 2, 3}}));
  }
  for (int rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    REQUIRE(events(trace, "wait", rank).back()["args"]["skew_us"] < 250000);
  }
}

TEST_CASE("messages are arrows with both ends, and no duration is negative") {
  const Json trace = trace_of(4, [](const Communicator& world) {
    const int next = (world.rank() + 1) % 4, previous = (world.rank() + 3) % 4;
    const Tensor out = Tensor::zeros({50000}, DType::f32), in = Tensor::zeros({50000}, DType::f32);
    for (int round = 0; round < 5; ++round) {
      const SendRecv batch[] = {{SendRecv::send, out, next}, {SendRecv::recv, in, previous}};
      world.send_recv_async(batch).wait();
    }
  });
  std::map<int, std::vector<Json>> flows;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] == "X") REQUIRE(event["dur"] >= 0);
    if (event["ph"] == "s" || event["ph"] == "f") flows[event["id"]].push_back(event);
  }
  REQUIRE(flows.size() == 4 * 5);
  for (const auto& [id, ends] : flows) {
    REQUIRE(ends.size() == 2);
    const Json& start = ends[0]["ph"] == "s" ? ends[0] : ends[1];
    const Json& finish = ends[0]["ph"] == "s" ? ends[1] : ends[0];
    REQUIRE(start["ph"] == "s");
    REQUIRE(finish["ph"] == "f");
    REQUIRE((int(start["pid"]) + 1) % 4 == finish["pid"]);
    REQUIRE(start["ts"] <= finish["ts"]);
  }
}

TEST_CASE(
    "messages to several ranks have lanes of their own, as has each of two strands in turns") {
  const Json trace = trace_of(3, [](const Communicator& world) {
    const TraceScope step("train_step");
    const Tensor large = Tensor::zeros({200000}, DType::f32), in = Tensor::zeros({2}, DType::f32);
    const Tensor small = Tensor::zeros({2}, DType::f32);
    if (world.rank() == 0) {  // both are under way at once
      Handle first = world.send_async(large, 1), second = world.send_async(small, 2);
      second.wait();
      first.wait();
    } else {
      std::this_thread::sleep_for(milliseconds(world.rank() == 1 ? 20 : 1));
      world.recv(world.rank() == 1 ? large : in, 0);
    }
    auto forward = std::make_unique<TraceScope>("forward");
    set_thread_turn(1);
    auto backward = std::make_unique<TraceScope>("backward");
    world.barrier();
    set_thread_turn(0);
    forward.reset();
    backward.reset();
  });
  std::map<int, std::string> lanes;
  for (const Json& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name" && event["pid"] == 0) {
      lanes[event["tid"]] = event["args"]["name"];
    }
  }
  REQUIRE(lanes == std::map<int, std::string>{{0, "main"},
                                              {1, "main, in turns"},
                                              {2, "world send to rank 2"},
                                              {3, "world send to rank 1"},
                                              {4, "world"}});
  REQUIRE(events(trace, "wait", 0).back()["tid"] == 1);
}

TEST_CASE("waiting for a rank that is late is not communication") {
  const Json trace = trace_of(3, [](const Communicator& world) {
    world.barrier();
    if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(500));
    world.all_reduce(Tensor::zeros({4}, DType::f32));
  });
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    const Json wait = events(trace, "wait", rank).back();
    const double exposed = wait["args"]["exposed_us"], skew = wait["args"]["skew_us"];
    REQUIRE(std::abs(exposed + skew - wait["dur"].get<double>()) < 0.01);
    if (rank == 1) REQUIRE(skew == 0);
    if (rank != 1) REQUIRE(skew > 250000);
  }
}

TEST_CASE("the row about waiting says that one rank sends nothing, and has no zeros") {
  REQUIRE(waiting_row({}, 2).second == "no step was traced");
  REQUIRE(waiting_row({20, 1.5, 0.25}, 2).second ==
          "1.50 of a traced step's 20.00 ms; waiting for a late rank: 0.25 ms");
  for (const WaitingTime& waiting : {WaitingTime{}, WaitingTime{20, 0, 0}}) {
    REQUIRE(waiting_row(waiting, 1).second == "none: one rank sends nothing");
  }
}

TEST_CASE("only what is waited for inside of a step is a step's") {
  WaitingTime waiting;
  trace_of(
      2,
      [](const Communicator& world) {
        const auto wait_for_rank_1 = [&] {
          if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(500));
          world.barrier();
        };
        world.barrier();
        {
          const TraceScope step("train_step");
          wait_for_rank_1();
        }
        wait_for_rank_1();  // as a validation would
      },
      nullptr, &waiting);
  REQUIRE(waiting.step_ms >= 490);
  REQUIRE(waiting.skew_ms > 125);  // the mean of half a second and of nothing
  REQUIRE(waiting.skew_ms < 400);
}

TEST_CASE("each group has the time that its operations are waited for once all ranks have come") {
  WaitingTime waiting;
  const Json trace = trace_of(
      2,
      [](const Communicator& world) {
        const Communicator pair = world.split("pair", [](int) { return 0; });
        const Tensor x = Tensor::zeros({4}, DType::f32);
        const auto work = [&](int ops) {
          for (int i = 0; i < ops; ++i) ops::fill(x, 0);
        };
        const WorkClock clock;
        const TraceScope step("train_step");
        work(world.rank() == 1 ? 3 : 0);
        world.all_reduce(x);  // rank 0 is there after 0 us, rank 1 after 3; each waits for 7
        work(world.rank() == 0 ? 5 : 0);
        pair.all_reduce(x);  // after 12 and 10
        pair.all_reduce(x);  // after 19 and 17
      },
      nullptr, &waiting);
  const std::map<std::string, std::vector<double>> expected = {{"world", {4, 7}},
                                                               {"pair", {14, 10}}};
  for (int rank = 0; rank < 2; ++rank) {
    std::map<std::string, double> exposed;  // us, by group
    for (const Json& wait : events(trace, "wait", rank)) {
      const std::string id = std::to_string(int64_t(wait["args"]["group"]));
      if (wait["dur"] != 7.0) continue;  // the split's, by the clock of the machine
      exposed[trace["otherData"]["groups"][id]["name"]] += double(wait["args"]["exposed_us"]);
    }
    CAPTURE(rank);
    for (const auto& [group, us] : expected) REQUIRE(exposed[group] == us[rank]);
  }
  check_close(Values{waiting.exposed_ms, waiting.skew_ms, waiting.step_ms},
              Values{0.0175, 0.0035, 0.026}, 1e-12);
}

/// An all-reduce as rank `rank` would record it with a clock that is `ahead`: queued after 1 ms on
/// rank 0 and after 3 ms on rank 1, over after 5 ms, waited for from the moment it was queued.
void record_by_clock(const Communicator& world, int64_t ahead) {
  const int64_t start = 1000 * kMillisecond + ahead;
  Tracer& tracer = Runtime::current().tracer();
  Tracer::Exchange exchange;
  exchange.group = "world";
  exchange.group_id = 1;
  exchange.members = std::make_shared<const std::vector<int>>(std::vector{0, 1});
  exchange.kind = "all_reduce";
  exchange.number = 1;
  exchange.peer = -1;
  exchange.payload_bytes = exchange.wire_bytes = exchange.step = 0;
  exchange.queued_ns = start + (world.rank() == 0 ? 1 : 3) * kMillisecond;
  exchange.queued_cpu_ns = exchange.wait_cpu_begin_ns = 0;
  exchange.wait_cpu_end_ns = 250'000;
  exchange.begin_ns = exchange.wait_begin_ns = exchange.queued_ns;
  exchange.end_ns = exchange.wait_end_ns = start + 5 * kMillisecond;
  tracer.add(exchange);
  tracer.add(Tracer::Span{"train_step", "phase", start, start + 6 * kMillisecond, 0, 0, 0, 0, 0});
}

TEST_CASE("what clocks differ by is taken out before ranks are compared") {
  const auto ahead = [](int rank) { return rank * 700 * kMillisecond; };
  const Json trace = trace_of(
      2, [&](const Communicator& world) { record_by_clock(world, ahead(world.rank())); },
      [&](int rank) { return ahead(rank); });
  for (int rank = 0; rank < 2; ++rank) {
    CAPTURE(rank);
    REQUIRE(events(trace, "phase", rank).back()["ts"] == 0.0);
    const Json wait = events(trace, "wait", rank).back();
    REQUIRE(wait["ts"] == (rank == 0 ? 1000.0 : 3000.0));
    REQUIRE(wait["tdur"] == 250.0);
    REQUIRE(wait["args"]["exposed_us"] == 2000.0);
    REQUIRE(wait["args"]["skew_us"] == (rank == 0 ? 2000.0 : 0.0));
    REQUIRE(events(trace, "comm", rank).back()["args"]["submitted"] == wait["ts"]);
  }
}

TEST_CASE("messages there and back tell by how much clocks differ") {
  std::vector<int64_t> found(3);
  run_threads(3, [&](const Communicator& world) {
    const int64_t ahead = world.rank() * 5000 * kMillisecond;
    found[world.rank()] = measure_clock_offset(world, [=] { return clock_ns() + ahead; });
  });
  REQUIRE(found[0] == 0);
  for (int rank : {1, 2}) {
    REQUIRE(std::abs(found[rank] - rank * 5000 * kMillisecond) < 500 * kMillisecond);
  }
}

}  // namespace
}  // namespace usp::test
