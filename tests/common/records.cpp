#include <nlohmann/json.hpp>

#include "run/metrics.h"
#include "tensor/memory_profile.h"
#include "tensor/ops.h"
#include "tensor/trace.h"
#include "testing.h"
#include "trace_format.h"

/// What a run leaves behind: trace, metrics and memory as JSON.
namespace usp::test {
namespace {

using Json = nlohmann::json;

TEST_CASE("nothing is recorded until the tracer is told to") {
  OnDevice cpu;
  { const TraceScope scope("quiet"); }
  REQUIRE(cpu.runtime.tracer().spans().empty());
  cpu.runtime.tracer().record(true);
  { const TraceScope scope("loud"); }
  cpu.runtime.tracer().record(false);
  { const TraceScope scope("quiet again"); }
  REQUIRE(cpu.runtime.tracer().spans().size() == 1);
}

TEST_CASE("every operation leaves a span with its name, step, operations and bytes") {
  OnDevice cpu;
  Tracer& tracer = cpu.runtime.tracer();
  const Tensor x = Tensor::zeros({4, 3}, DType::f32), weight = Tensor::zeros({5, 3}, DType::f32);
  const Tensor y = Tensor::zeros({4, 5}, DType::f32);
  tracer.record(true);
  tracer.set_step(17);
  ops::linear_forward(y, x, weight);
  REQUIRE(tracer.spans().size() == 1);
  const Tracer::Span& span = tracer.spans()[0];
  REQUIRE(span.name == "linear_forward");
  REQUIRE(span.category == "op");
  REQUIRE(span.step == 17);
  REQUIRE(span.flops == 2 * 4 * 5 * 3);
  REQUIRE(span.bytes == 4 * (4 * 3 + 5 * 3 + 4 * 5));
  REQUIRE(span.begin_ns <= span.end_ns);
}

TEST_CASE("the trace file is JSON in which spans nest as their scopes did") {
  const TempDir dir;
  OnDevice cpu;
  cpu.runtime.tracer().record(true);
  {
    const TraceScope step("train_step");
    { const TraceScope forward("forward"); }
    {
      const TraceScope backward("backward");
      ops::fill(Tensor::empty({10}, DType::f32), 1);
    }
  }
  cpu.runtime.tracer().write(dir.file("trace.json"), "the_chapter");
  const Json json = read_trace(dir.file("trace.json"));
  std::map<std::string, Json> events;
  for (const Json& event : json.at("traceEvents")) events[event.at("name")] = event;
  REQUIRE(json.at("otherData").at("chapter") == "the_chapter");
  REQUIRE(json.at("otherData").at("ranks") == 1);
  REQUIRE(events.size() == 6);
  REQUIRE(events.at("process_name").at("ph") == "M");
  REQUIRE(events.at("process_name").at("args").at("name") == "rank 0");
  REQUIRE(events.at("thread_name").at("args").at("name") == "main");
  const auto inside = [&](const char* inner, const char* outer) {
    const Json &a = events.at(inner), &b = events.at(outer);
    const double begin = a.at("ts"), end = begin + a.at("dur").get<double>();
    const double outer_begin = b.at("ts"), outer_end = outer_begin + b.at("dur").get<double>();
    constexpr double kRounding = 0.002;  // microseconds, of three printed decimals
    return begin >= outer_begin - kRounding && end <= outer_end + kRounding;
  };
  for (const char* span : {"train_step", "forward", "backward", "fill"}) {
    REQUIRE(events.at(span).at("ph") == "X");
    REQUIRE(events.at(span).at("dur") >= 0);
    REQUIRE(events.at(span).at("args").at("step") == -1);
    REQUIRE(inside(span, "train_step"));
  }
  REQUIRE(events.at("train_step").at("ts") == 0);
  REQUIRE(inside("fill", "backward"));
  REQUIRE(!inside("backward", "forward"));
  REQUIRE(events.at("fill").at("args").at("bytes") == 40);
}

/// traceEvents of what the tracer in force holds.
Json trace_events() {
  const TempDir dir;
  Runtime::current().tracer().write(dir.file("trace.json"), "the_chapter");
  return read_trace(dir.file("trace.json")).at("traceEvents");
}

TEST_CASE("a phase counts the operations of the ops inside, and tells number and micro-batch") {
  OnDevice cpu;
  cpu.runtime.tracer().record(true);
  const Tensor x = Tensor::zeros({4, 3}, DType::f32), weight = Tensor::zeros({5, 3}, DType::f32);
  const Tensor y = Tensor::zeros({4, 5}, DType::f32);
  ops::linear_forward(y, x, weight);  // before it
  {
    const TraceScope forward("forward", {.micro_batch = 2});
    const TraceScope block("block", {.number = 0});
    ops::linear_forward(y, x, weight);
    ops::linear_forward(y, x, weight);
  }
  std::map<std::string, Json> events;
  for (const Json& event : trace_events()) events[event.at("name")] = event;
  const Json& forward = events.at("forward").at("args");
  const Json& block = events.at("block 0").at("args");
  constexpr int64_t kFlops = 2 * 4 * 5 * 3, kBytes = 4 * (4 * 3 + 5 * 3 + 4 * 5);
  REQUIRE(forward.at("micro_batch") == 2);
  REQUIRE(!block.contains("micro_batch"));
  REQUIRE(forward.at("flops") == 2 * kFlops);
  REQUIRE(block.at("flops") == 2 * kFlops);
  REQUIRE(!block.contains("bytes"));
  const Json& op = events.at("linear_forward");
  REQUIRE(op.at("args").at("flops") == kFlops);
  const double ns = 1e3 * op.at("dur").get<double>();
  // Three decimals are printed.
  REQUIRE(std::abs(op.at("args").at("GFLOP/s").get<double>() - kFlops / ns) <= 0.001);
  REQUIRE(std::abs(op.at("args").at("GB/s").get<double>() - kBytes / ns) <= 0.001);
}

TEST_CASE("a trace counts the live bytes of every category") {
  OnDevice cpu;
  Allocator& allocator = cpu.allocator();
  const CategoryScope weights(Category::weights);
  const Tensor before = Tensor::empty({10}, DType::f64);
  cpu.runtime.tracer().record(true);
  allocator.record_events(true);
  {
    const TraceScope step("train_step");
    const CategoryScope activations(Category::activations);
    const Tensor x = Tensor::empty({100}, DType::f64), y = Tensor::empty({1}, DType::f64);
  }
  {
    const CategoryScope communication(Category::communication);
    const Tensor scratch = Tensor::empty({50}, DType::f64);
    Tensor first = Tensor::empty({4}, DType::f64, "gathered weights");
    const Tensor second = Tensor::empty({3}, DType::f64, "gathered weights");
    first = {};
    const Tensor other = Tensor::empty({1}, DType::f64, "gradients to reduce");
  }
  const Tensor after = Tensor::empty({2}, DType::f64);
  std::map<std::string, std::vector<int64_t>> live, buffers;
  double last = 0;
  for (const Json& event : trace_events()) {
    if (event.at("ph") != "C") continue;
    REQUIRE(event.at("pid") == 0);
    REQUIRE(event.at("ts").get<double>() >= last);
    last = event.at("ts");
    REQUIRE(event.at("args").size() == 1);
    const auto bytes = event.at("args").begin();
    (event.at("name") == "memory" ? live : buffers)[bytes.key()].push_back(bytes.value());
  }
  REQUIRE(live.size() == kNumCategories);
  REQUIRE(live["weights"] == std::vector<int64_t>{80, 96});
  REQUIRE(live["activations"] == std::vector<int64_t>{0, 800, 808, 800, 0});
  REQUIRE(live["optimizer"] == std::vector<int64_t>{0});
  REQUIRE(live["communication"] == std::vector<int64_t>{0, 400, 432, 456, 424, 432, 424, 400, 0});
  REQUIRE(buffers.size() == 2);
  REQUIRE(buffers["gathered weights"] == std::vector<int64_t>{32, 56, 24, 0});
  REQUIRE(buffers["gradients to reduce"] == std::vector<int64_t>{8, 0});
  const std::vector<LiveBytes> peaks = peaks_by_name(allocator, Category::communication);
  REQUIRE(peaks.size() == 2);
  REQUIRE((peaks[0].name == "gathered weights" && peaks[0].bytes == 56));
  REQUIRE((peaks[1].name == "gradients to reduce" && peaks[1].bytes == 8));
}

TEST_CASE("a trace of nothing is JSON, too") {
  const OnDevice cpu;
  const TempDir dir;
  Tracer().write(dir.file("trace.json"), "p");
  REQUIRE(read_trace(dir.file("trace.json")).at("traceEvents").size() == 2);
}

TEST_CASE("a file that cannot be written is an error") {
  OnDevice cpu;
  check_throws<Error>([] { Tracer().write("/nonexistent/trace.json", "p"); }, {"/nonexistent"});
  check_throws<Error>([] { MetricsWriter("/nonexistent/metrics.jsonl", DType::f32); },
                      {"/nonexistent"});
}

TEST_CASE("a full disk is an error, not a truncated file") {
  if (!std::filesystem::exists("/dev/full")) return;
  OnDevice cpu;
  MetricsWriter writer("/dev/full", DType::f32);
  StepMetrics metrics;
  metrics.step = 3;
  check_throws<Error>([&] { writer.write(metrics, cpu.runtime); }, {"/dev/full", "step 3"});
  check_throws<Error>([] { Tracer().write("/dev/full", "p"); }, {"/dev/full"});
}

TEST_CASE("a number in JSON keeps the digits asked for, and strings stand for what is not finite") {
  REQUIRE(json_number(0.1, 17) == "0.10000000000000001");
  REQUIRE(json_number(1.0 / 3, 9) == "0.333333333");
  REQUIRE(json_number(0, 9) == "0");
  REQUIRE(json_number(kNaN, 9) == "\"nan\"");
  REQUIRE(json_number(kInf, 9) == "\"inf\"");
  REQUIRE(json_number(-kInf, 9) == "\"-inf\"");
  Random random(1);
  for (int i = 0; i < 1000; ++i) {
    const double value = random.normal() * std::pow(10.0, double(random.integer(-300, 300)));
    REQUIRE(Json::parse(json_number(value, 17)).get<double>() == value);
    const auto single = static_cast<float>(random.normal());
    REQUIRE(Json::parse(json_number(single, 9)).get<float>() == single);
  }
}

TEST_CASE("metrics are one JSON object a line, on disk as soon as they are written") {
  const TempDir dir;
  OnDevice cpu;
  const CategoryScope scope(Category::optimizer);
  const Tensor state = Tensor::empty({100}, DType::f32);
  StepMetrics metrics;
  metrics.step = 4;
  metrics.loss = 1.0 / 3;
  metrics.grad_norm = kInf;
  metrics.lr = 1e-3;
  metrics.tokens = 12'000'000'000;
  metrics.step_ms = 12.5;
  metrics.tokens_per_s = 1e4;
  metrics.mfu = 0.5;
  metrics.book_mfu = 0.75;
  metrics.hfu = 0.625;
  metrics.flops = 1'000'000'000'007;
  metrics.val_loss = kNaN;
  MetricsWriter writer(dir.file("metrics.jsonl"), DType::f64);
  writer.write(metrics, cpu.runtime);
  metrics.has_val_loss = true;
  writer.write(metrics, cpu.runtime);

  std::ifstream lines(dir.file("metrics.jsonl"));
  std::string first, second, third;
  std::getline(lines, first);
  std::getline(lines, second);
  REQUIRE(!std::getline(lines, third));
  const Json json = Json::parse(first);
  REQUIRE(json.at("step") == 4);
  REQUIRE(json.at("loss").get<double>() == 1.0 / 3);
  REQUIRE(json.at("grad_norm") == "inf");
  REQUIRE(json.at("lr") == 1e-3);
  REQUIRE(json.at("tokens") == 12'000'000'000);
  REQUIRE(json.at("step_ms") == 12.5);
  REQUIRE(json.at("tokens_per_s") == 1e4);
  REQUIRE(json.at("mfu") == 0.5);
  REQUIRE(json.at("book_mfu") == 0.75);
  REQUIRE(json.at("skipped") == true);
  REQUIRE(json.at("hfu") == 0.625);
  REQUIRE(json.at("flops") == 1'000'000'000'007);
  REQUIRE(!json.contains("val_loss"));
  REQUIRE(json.at("peak_bytes").size() == kNumCategories);
  REQUIRE(json.at("peak_bytes").at("optimizer") == 400);
  REQUIRE(json.at("peak_bytes").at("weights") == 0);
  REQUIRE(Json::parse(second).at("val_loss") == "nan");
}

TEST_CASE("a call that moves nothing is in the ledger and in a step's metrics, too") {
  Ledger ledger;
  ledger.add("dp", CommKind::barrier, {.calls = 1});
  ledger.add("ep", CommKind::all_to_all, {.calls = 2, .header_bytes = 160});
  REQUIRE(ledger.payload_json(Ledger()) == R"({"dp.barrier": 0, "ep.all_to_all": 0})");
  REQUIRE(ledger.payload_json(ledger) == "{}");
  const Json json = Json::parse(ledger.to_json());
  REQUIRE(json.size() == 2);
  REQUIRE(json.at("dp.barrier").at("calls") == 1);
  REQUIRE(json.at("ep.all_to_all").at("header_bytes") == 160);
}

TEST_CASE("the memory record holds peaks, reservations, phases and every event") {
  OnDevice cpu;
  const Tensor before = Tensor::empty({10}, DType::f32);
  cpu.allocator().record_events(true);
  Tracer& tracer = cpu.runtime.tracer();
  tracer.record(true);
  tracer.set_step(4);
  {
    const TraceScope forward("forward"), op("linear_forward", "op");
    const BlockScope block(3);
    const Tensor x = Tensor::empty({100}, DType::f64, "qkv");
    const Tensor y = Tensor::empty({1}, DType::f64);
  }
  const Json json = Json::parse(memory_json(cpu.allocator(), tracer));
  REQUIRE(json.at("peak_bytes").at("activations") == 848);
  REQUIRE(json.at("peak_total_bytes") == 848);
  REQUIRE(json.at("initial_bytes").at("activations") == 40);
  REQUIRE(json.at("initial_bytes").at("weights") == 0);
  REQUIRE(json.at("reserved_bytes") == cpu.allocator().reserved_bytes());
  REQUIRE(json.at("reserved_bytes") == 64 + 832 + 64);
  REQUIRE(json.at("reserved_workspace_bytes") == 0);
  REQUIRE(json.at("system_allocations") == 3);
  REQUIRE(json.at("names") == Json::parse(R"(["qkv", ""])"));
  REQUIRE(json.at("phases").size() == 1);
  const Json phase = json.at("phases")[0];
  REQUIRE(phase[2] == "forward");
  REQUIRE(phase[3] == 4);
  REQUIRE(json.at("events").size() == 4);
  const Json made = json.at("events")[0], freed = json.at("events")[3];
  REQUIRE((phase[0] <= made[0] && made[0] <= freed[0] && freed[0] <= phase[1]));
  REQUIRE(made[1] == 800);
  REQUIRE(freed[1] == -800);
  for (const Json& event : {made, freed}) {
    REQUIRE(event[2] == "activations");
    REQUIRE(event[3] == 3);
    REQUIRE(event[4] == 0);
  }
}

}  // namespace
}  // namespace usp::test
