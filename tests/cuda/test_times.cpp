#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "comm/launch.h"
#include "emulator/emulator.h"
#include "run/matmul_rate.h"
#include "run/timeline.h"
#include "tensor/marks.h"
#include "tensor/ops.h"
#include "tensor/work_timer.h"
#include "testing.h"
#include "trace_format.h"

/// When a device did what the host had queued: spans, messages and waits in lanes of their own.
namespace usp::test {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;

/// Times are written with three decimals of a microsecond.
constexpr double kRounding = 0.002;

/// Makes the emulator's events tell the host's time. Its streams run when something waits for them.
emulator::Options by_host_clock() {
  emulator::Options options = emulator::options;
  options.host_clock = true;
  return options;
}

std::vector<Json> events(const Json& trace, const std::string& category, int rank = 0) {
  std::vector<Json> found;
  for (const Json& event : trace["traceEvents"]) {
    if (event.value("cat", "") == category && event["pid"] == rank && event["ph"] == "X") {
      found.push_back(event);
    }
  }
  return found;
}

std::vector<std::pair<std::string, int64_t>> names_and_steps(const std::vector<Json>& events) {
  std::vector<std::pair<std::string, int64_t>> found;
  for (const Json& event : events) found.emplace_back(event["name"], event["args"]["step"]);
  return found;
}

double begin_of(const Json& event) { return event["ts"]; }
double end_of(const Json& event) { return event["ts"].get<double>() + event["dur"].get<double>(); }

/// One begins when the one before it has ended.
void check_apart(std::vector<Json> events) {
  std::ranges::sort(events, {}, begin_of);
  for (size_t i = 1; i < events.size(); ++i) {
    REQUIRE(begin_of(events[i]) >= end_of(events[i - 1]) - kRounding);
  }
}

/// {number: name} of a rank's lanes.
std::map<int, std::string> lanes_of(const Json& trace, int rank) {
  std::map<int, std::string> lanes;
  for (const Json& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name" && event["pid"] == rank) {
      lanes[event["tid"]] = event["args"]["name"];
    }
  }
  return lanes;
}

void run_step(const Tensor& x) {
  const TraceScope step("train_step");
  {
    const TraceScope forward("forward", {.micro_batch = 1});
    const TraceScope block("block", {.number = 3});
    ops::fill(x, 1);
    ops::add(x, x, x);
  }
  const TraceScope optimizer("optimizer");
  ops::add(x, x, x);
}

/// The trace of three steps, and what is known of the clocks.
std::pair<Json, Marks::Clocks> trace_of_steps(Device device) {
  const TempDir dir;
  OnDevice on(device);
  Tracer& tracer = on.runtime.tracer();
  const Tensor x = Tensor::zeros({1 << 16}, DType::f32);
  tracer.record(true);
  for (int64_t step = 1; step <= 3; ++step) {
    tracer.set_step(step);
    run_step(x);
  }
  tracer.record(false);
  tracer.write(dir.file("trace.json"), "a_chapter");
  const Accelerator* accelerator = on.runtime.accelerator();
  const auto clocks =
      accelerator == nullptr ? Marks::Clocks() : on.runtime.accelerator()->marks().clocks();
  return {read_trace(dir.file("trace.json")), clocks};
}

TEST_CASE("what the host's lane queues, the device's lane does: in order, one after the other") {
  const Json trace = trace_of_steps(Device::cuda).first;
  REQUIRE(lanes_of(trace, 0) == std::map<int, std::string>{{0, "main"}, {kDeviceLane, "device"}});
  for (const char* category : {"op", "phase"}) {
    CAPTURE(category);
    const std::vector<Json> queued = events(trace, category),
                            done = events(trace, fmt::format("device {}", category));
    REQUIRE(done.size() == 3 * (std::string(category) == "op" ? 3 : 4));
    REQUIRE(names_and_steps(done) == names_and_steps(queued));
    for (size_t i = 0; i < done.size(); ++i) {
      REQUIRE(queued[i]["tid"] == 0);
      REQUIRE(done[i]["tid"] == kDeviceLane);
      REQUIRE(done[i]["dur"] > 0.0);
      for (const char* same : {"flops", "bytes", "micro_batch"}) {
        REQUIRE(done[i]["args"].value(same, 0) == queued[i]["args"].value(same, 0));
      }
      REQUIRE(std::abs(done[i]["args"]["queued"].get<double>() - end_of(queued[i])) < kRounding);
      REQUIRE(!queued[i]["args"].contains("GB/s"));  // of the time that queueing takes
      REQUIRE(done[i]["args"].contains("GB/s") == queued[i]["args"].contains("bytes"));
    }
  }
  check_apart(events(trace, "device op"));
  const std::vector<Json> phases = events(trace, "device phase");
  for (const Json& op : events(trace, "device op")) {  // an op lies in its step
    const auto step = std::ranges::find_if(phases, [&](const Json& phase) {
      return phase["name"] == "train_step" && phase["args"]["step"] == op["args"]["step"];
    });
    REQUIRE(begin_of(op) >= begin_of(*step) - kRounding);
    REQUIRE(end_of(op) <= end_of(*step) + kRounding);
  }
}

TEST_CASE("a trace of the CPU has no lane of a device") {
  const Json trace = trace_of_steps(Device::cpu).first;
  REQUIRE(lanes_of(trace, 0) == std::map<int, std::string>{{0, "main"}});
  for (const Json& event : trace["traceEvents"]) {
    REQUIRE(event["name"] != "process_labels");
    REQUIRE(!event.value("cat", "").starts_with("device"));
    if (event["ph"] == "X") REQUIRE(!event["args"].contains("queued"));
  }
}

TEST_CASE("the device's times are the host's: nothing begins before it was queued") {
  const emulator::Use use(by_host_clock());
  const auto [trace, clocks] = trace_of_steps(Device::cuda);
  REQUIRE(clocks.comparisons == 5);  // at the beginning, before each step, at the end
  REQUIRE(clocks.drift_ns <= 2 * clocks.uncertainty_ns + 2000);  // there is but one clock
  const double uncertain = double(clocks.uncertainty_ns) * 1e-3 + 1;
  const std::vector<Json> queued = events(trace, "op"), done = events(trace, "device op");
  for (size_t i = 0; i < done.size(); ++i) {
    CAPTURE(i);
    REQUIRE(begin_of(done[i]) >= begin_of(queued[i]) - uncertain);
    // The marks of a step are read before the next one begins.
    const size_t next = (i / 3 + 1) * 3;
    if (next < queued.size()) REQUIRE(end_of(done[i]) <= begin_of(queued[next]) + uncertain);
  }
  std::string label;
  for (const Json& event : trace["traceEvents"]) {
    if (event["name"] == "process_labels") label = event["args"]["labels"];
  }
  REQUIRE(label ==
          fmt::format("device's clock: compared 5 times to {:.1f} us, drift at most {:.1f} us",
                      double(clocks.uncertainty_ns) * 1e-3, double(clocks.drift_ns) * 1e-3));
}

TEST_CASE("a scope that outlives the recording has no times of the device") {
  OnDevice gpu(Device::cuda);
  Tracer& tracer = gpu.runtime.tracer();
  tracer.record(true);
  {
    const TraceScope phase("phase");
    ops::fill(Tensor::empty({3}, DType::f32), 1);
    tracer.record(false);
  }
  tracer.record(true);
  ops::fill(Tensor::empty({3}, DType::f32), 1);
  tracer.record(false);
  REQUIRE(tracer.spans().size() == 3);
  REQUIRE(tracer.spans()[0].on_device());
  REQUIRE(!tracer.spans()[1].on_device());  // the phase
  REQUIRE(tracer.spans()[2].on_device());
}

TEST_CASE("the rate of products is taken when the device has done them") {
  run_threads(
      1,
      [](const Communicator& world) {
        const Accelerator& accelerator = *Runtime::current().accelerator();
        const int64_t before = accelerator.waits();
        USP_CHECK(measure_matmul_gflops(world, DType::f32, {{4, 4, 4}}, /*seconds=*/0) > 0,
                  "no rate");
        // Before and behind each round: two that do not count, and three.
        USP_CHECK(accelerator.waits() == before + 10, "{} waits", accelerator.waits() - before);
      },
      60, Device::cuda);
}

/// Seconds that a timer has for so many operations, beside which the host sleeps. They are there
/// when it has read, and no sooner where `later`.
double time_of_operations(WorkTimer& timer, const Tensor& x, int count, bool later) {
  std::vector<double> found;
  const int64_t begin = timer.now();
  for (int i = 0; i < count; ++i) ops::fill(x, 1);
  std::this_thread::sleep_for(milliseconds(20));
  timer.since(begin, [&](double seconds) { found.push_back(seconds); });
  REQUIRE(found.empty() == later);
  timer.read();
  REQUIRE(found.size() == 1);
  return found[0];
}

TEST_CASE("a timer has the device's times, once they are read, and the CPU's at once") {
  {
    const OnDevice cpu(Device::cpu);
    WorkTimer timer;
    REQUIRE(time_of_operations(timer, Tensor::zeros({3}, DType::f32), 1, /*later=*/false) >= 0.02);
  }
  OnDevice gpu(Device::cuda);
  const Tensor x = Tensor::zeros({1 << 16}, DType::f32);
  const int64_t waits = gpu.runtime.accelerator()->waits();
  WorkTimer timer;
  // The emulated device takes the same time for the same work, in which nobody sleeps.
  const auto time_of = [&](int count) { return time_of_operations(timer, x, count, true); };
  const double one = time_of(1), two = time_of(2), ten = time_of(10);
  REQUIRE(two > one);
  REQUIRE(std::abs((ten - one) - 9 * (two - one)) < 1e-7);
  REQUIRE(ten < 0.02);
  REQUIRE(std::abs(time_of(1) - one) < 1e-7);

  timer.since(timer.now(), [](double) { FAIL("what was forgotten is used"); });
  timer.forget();
  time_of(1);
  const emulator::TimedEvents before = emulator::timed_events();
  for (int i = 0; i < 5; ++i) time_of(1);
  const emulator::TimedEvents after = emulator::timed_events();
  REQUIRE(after.created == before.created);            // they serve again
  REQUIRE(after.recorded == before.recorded + 5 * 6);  // two, and four that compare the clocks
  REQUIRE(gpu.runtime.accelerator()->waits() == waits);
}

TEST_CASE("an op on tensors of the host is none of the device's") {
  OnDevice gpu(Device::cuda);
  Tracer& tracer = gpu.runtime.tracer();
  const HostScope on_host;
  const Tensor x = Tensor::zeros({3}, DType::f64);
  tracer.record(true);
  ops::fill(x, 1);
  tracer.record(false);
  REQUIRE(tracer.spans().size() == 1);
  REQUIRE(!tracer.spans()[0].on_device());
  REQUIRE(tracer.span_events(0, 0).find("device") == std::string::npos);
}

/// A step of one rank: a sum that its kernels need, and messages around the ring.
void exchange(const Communicator& world, int64_t count) {
  const TraceScope step("train_step");
  const int n = world.size(), next = (world.rank() + 1) % n, previous = (next + n - 2) % n;
  const Tensor sum = Tensor::zeros({count}, DType::f32), got = Tensor::zeros({count}, DType::f32);
  ops::fill(sum, world.rank());
  Handle handle = world.all_reduce_async(sum);
  ops::fill(got, 0);
  handle.wait();
  ops::add(sum, sum, sum);
  const SendRecv batch[] = {{SendRecv::send, sum, next}, {SendRecv::recv, got, previous}};
  world.send_recv_async(batch).wait();
  ops::add(got, got, sum);
}

constexpr int kRanks = 3;
constexpr int64_t kCount = 3000, kBytes = 4 * kCount;

/// The trace of two steps of ranks that share a GPU; `body` is a step.
Json trace_of_ranks(
    Device device, EngineKind kind, WaitingTime* waiting = nullptr,
    const std::function<void(const Communicator&)>& body = [](const Communicator& world) {
      exchange(world, kCount);
    }) {
  const TempDir dir;
  run_threads(
      kRanks,
      [&](const Communicator& world) {
        if (device == Device::cuda) world.engine().set_device_kind(kind);
        const RunDir run_dir(dir.file("run"), /*overwrite=*/false);
        world.barrier();
        Tracer& tracer = Runtime::current().tracer();
        tracer.record(true);
        for (int64_t step = 1; step <= 2; ++step) {
          tracer.set_step(step);
          body(world);
          Runtime::current().wait();  // as a report does
        }
        tracer.record(false);
        Connection connection;
        connection.ranks = world.size();
        const WaitingTime found = write_timeline(world, connection, run_dir, "a_chapter", 100);
        if (waiting != nullptr && world.rank() == 0) *waiting = found;
        world.barrier();
      },
      60, device);
  return read_trace(dir.file("run/trace.json"), /*one_clock=*/device == Device::cpu);
}

/// Payload and what was sent, by kind, group and number, but for what ranks tell each other about
/// themselves.
std::map<std::string, std::pair<int64_t, int64_t>> traffic(const Json& trace, int rank) {
  std::map<std::string, std::pair<int64_t, int64_t>> found;
  for (const Json& event : events(trace, "comm", rank)) {
    const Json& args = event["args"];
    if (args["payload_bytes"] != kBytes) continue;
    found[fmt::format("{} {}", std::string(args["kind"]), int64_t(args["step"]))] = {
        args["payload_bytes"], args["wire_bytes"]};
  }
  return found;
}

/// Each wait of the host for an operation is one of the device's, too. Its parts make the whole,
/// and all parts together what the report says.
void check_waits(const Json& trace, const WaitingTime& waiting) {
  double exposed_us = 0, skew_us = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    CAPTURE(rank);
    const std::vector<Json> of_host = events(trace, "wait", rank),
                            of_device = events(trace, "device wait", rank);
    REQUIRE(names_and_steps(of_device) == names_and_steps(of_host));
    std::vector<Json> lane = events(trace, "device op", rank);
    for (const Json& wait : of_device) {
      REQUIRE(wait["tid"] == kDeviceLane);
      const double exposed = wait["args"]["exposed_us"], skew = wait["args"]["skew_us"];
      REQUIRE(exposed >= 0);
      REQUIRE(skew >= 0);
      REQUIRE(std::abs(exposed + skew - wait["dur"].get<double>()) < kRounding);
      exposed_us += exposed;
      skew_us += skew;
      lane.push_back(wait);
    }
    check_apart(lane);
  }
  REQUIRE(std::abs(waiting.exposed_ms - exposed_us * 1e-3 / kRanks / 2) < 1e-5);
  REQUIRE(std::abs(waiting.skew_ms - skew_us * 1e-3 / kRanks / 2) < 1e-5);
  double step_us = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const Json& phase : events(trace, "device phase", rank)) {
      if (rank == 0 && phase["name"] == "train_step") step_us += phase["dur"].get<double>();
    }
  }
  REQUIRE(std::abs(waiting.step_ms - step_us * 1e-3 / 2) < 1e-5);
}

/// A device's messages are those of the CPU's ranks, who copy nothing.
void check_traffic(const Json& trace, const Json& on_cpu, int rank) {
  REQUIRE(traffic(trace, rank).size() == 6);
  REQUIRE(traffic(trace, rank) == traffic(on_cpu, rank));
  REQUIRE(events(on_cpu, "device copy", rank).empty());
}

TEST_CASE("messages by way of the host are two copies, in the lanes of their queues") {
  using emulator::Order;
  emulator::Options options = emulator::options;
  options.streams = GENERATE(Order::forward, Order::reverse, Order::shuffled);
  const emulator::Use use(options);
  WaitingTime waiting;
  const Json trace = trace_of_ranks(Device::cuda, EngineKind::staged, &waiting);
  const Json on_cpu = trace_of_ranks(Device::cpu, EngineKind::host);
  for (int rank = 0; rank < kRanks; ++rank) {
    CAPTURE(rank);
    check_traffic(trace, on_cpu, rank);
    const std::map<int, std::string> lanes = lanes_of(trace, rank);
    std::map<std::string, int64_t> bytes;
    std::map<int, std::vector<Json>> by_lane;
    for (const Json& copy : events(trace, "device copy", rank)) {
      const std::string where_to = copy["args"]["where_to"], kind = copy["args"]["kind"];
      REQUIRE(copy["tid"] > kDeviceLane);
      REQUIRE(lanes.at(copy["tid"]) == "device: messages " + where_to);
      REQUIRE(copy["args"]["dimension"] == "world");
      REQUIRE(copy["dur"] > 0.0);
      bytes[kind + " " + where_to] += int64_t(copy["args"]["bytes"]);
      by_lane[copy["tid"]].push_back(copy);
    }
    REQUIRE(bytes == std::map<std::string, int64_t>{{"all_reduce to the host", 2 * kBytes},
                                                    {"all_reduce to the device", 2 * kBytes},
                                                    {"send to the host", 2 * kBytes},
                                                    {"recv to the device", 2 * kBytes}});
    for (const auto& [lane, copies] : by_lane) check_apart(copies);
  }
  check_waits(trace, waiting);
}

TEST_CASE("NCCL's messages are the device's: with its times, and the bytes of the CPU's") {
  WaitingTime waiting;
  const Json trace = trace_of_ranks(Device::cuda, EngineKind::nccl, &waiting);
  const Json on_cpu = trace_of_ranks(Device::cpu, EngineKind::host);
  for (int rank = 0; rank < kRanks; ++rank) {
    CAPTURE(rank);
    check_traffic(trace, on_cpu, rank);
    REQUIRE(events(trace, "device copy", rank).empty());
    const std::map<int, std::string> lanes = lanes_of(trace, rank);
    for (const Json& event : events(trace, "comm", rank)) {
      if (event["args"]["payload_bytes"] != kBytes) continue;
      const std::string kind = event["args"]["kind"];
      // Each rank sends to the next and receives from the one before.
      const std::map<std::string, std::string> group = {
          {"all_reduce", "world"},
          {"send", fmt::format("world send to rank {}", (rank + 1) % kRanks)},
          {"recv", fmt::format("world recv from rank {}", (rank + kRanks - 1) % kRanks)}};
      REQUIRE(lanes.at(event["tid"]) == "device: messages of " + group.at(kind));
      REQUIRE(event["dur"] > 0.0);
      // The device goes on when the message is over.
      for (const Json& wait : events(trace, "device wait", rank)) {
        if (wait["args"]["kind"] != kind || wait["args"]["number"] != event["args"]["number"] ||
            wait["args"]["group"] != event["args"]["group"]) {
          continue;
        }
        REQUIRE(end_of(wait) >= end_of(event) - kRounding);
      }
    }
  }
  check_waits(trace, waiting);
}

/// The host comes late, but the device does not. A pause of the whole machine counts as one turn.
void come_late() {
  for (int i = 0; i < 400; ++i) {
    std::this_thread::sleep_for(milliseconds(1));
    emulator::run_streams();
  }
}

TEST_CASE("a device that waits for a late rank waits with skew, whoever carries messages") {
  const emulator::Use use(by_host_clock());
  for (EngineKind kind : {EngineKind::staged, EngineKind::nccl}) {
    CAPTURE(int(kind));
    const Json trace = trace_of_ranks(Device::cuda, kind, nullptr, [](const Communicator& world) {
      const TraceScope step("train_step");
      const Tensor x = Tensor::zeros({kCount}, DType::f32);
      world.all_reduce(x);  // makes NCCL's communicator, too
      Runtime::current().wait();
      world.barrier();
      if (world.rank() == 1) come_late();
      Handle handle = world.all_reduce_async(x);
      handle.wait();
      ops::add(x, x, x);
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      CAPTURE(rank);
      const Json wait = events(trace, "device wait", rank).back();
      REQUIRE(wait["name"] == "wait all_reduce");
      if (rank == 1) REQUIRE(wait["args"]["skew_us"] < 200000);
      if (rank != 1) REQUIRE(wait["args"]["skew_us"] > 200000);
      REQUIRE(wait["args"]["exposed_us"] < 200000);
    }
  }
}

TEST_CASE("events of messages serve again, and without a trace there are none") {
  for (EngineKind kind : {EngineKind::staged, EngineKind::nccl}) {
    CAPTURE(int(kind));
    const emulator::TimedEvents before = emulator::timed_events();
    emulator::TimedEvents untraced;
    std::vector<int64_t> created;
    run_threads(
        kRanks,
        [&](const Communicator& world) {
          world.engine().set_device_kind(kind);
          Tracer& tracer = Runtime::current().tracer();
          const auto run = [&](int64_t step) {
            tracer.set_step(step);
            exchange(world, kCount);
            Runtime::current().wait();
            world.barrier();
          };
          run(0);
          if (world.rank() == 0) untraced = emulator::timed_events();
          world.barrier();
          tracer.record(true);
          for (int64_t step = 1; step <= 6; ++step) {
            run(step);
            if (world.rank() == 0) created.push_back(emulator::timed_events().created);
            world.barrier();
          }
          tracer.record(false);
        },
        60, Device::cuda);
    REQUIRE(untraced == before);
    REQUIRE(created.at(0) > before.created);
    REQUIRE(std::set(created.begin() + 1, created.end()).size() == 1);
  }
}

}  // namespace
}  // namespace usp::test
