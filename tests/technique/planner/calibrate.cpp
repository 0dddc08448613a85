#include "planner/calibrate.h"

#include <utility>

#include "planner/cost.h"
#include "technique/planner/edited_cluster.h"

/// A cluster's numbers, found again from times that were made with them.
namespace usp::test {
namespace {

/// A machine whose numbers are none that a fit begins with.
Cluster machine() {
  const auto is = [](double value) { return Sourced{value, Origin::assumed, "a test"}; };
  Cluster cluster = round_cluster(2);
  cluster.name = "machine";
  cluster.host_computes = true;
  cluster.peak_tflops[DType::f32] = is(0.08);
  cluster.memory_gbs = is(7);
  cluster.half_width = is(40);
  cluster.half_depth = is(25);
  cluster.attention = is(0.2);
  cluster.launch_us = is(3);
  cluster.node = {is(35), is(0.6)};
  cluster.net = {is(90), is(0.2)};
  return cluster;
}

/// What a run of these flags would take on a cluster, were every event as long as the cluster says.
RunTimes times_of(const std::string& flags, const Cluster& cluster) {
  const TrainConfig config = layout_of_flags(instead(kSmall, flags + " --dtype f32"));
  Cost cost(cluster);
  RunTimes times;
  times.ranks_per_node = static_cast<int64_t>(cluster.ranks_per_node.value);
  times.between = cost.launch();
  for (int rank = 0; rank < config.mesh().ranks(); ++rank) {
    const Program program = record(config, rank);
    for (const Kernel& kernel : program.kernels) times.ops.push_back({kernel, cost.of(kernel), 10});
    times.ops.push_back({Kernel{.op = "adamw"}, 1e-7, 10});  // of an empty part of ZeRO's
    for (const Exchange& exchange : program.exchanges) {
      const ProgramGroup& group = program.groups[exchange.group];
      if (exchange.kind == CommKind::recv) continue;  // its sender has it
      times.sent.push_back({exchange, group, cost.of(exchange, group).arrives, 3});
    }
    times.between_them += std::ssize(program.events);
  }
  return times;
}

std::vector<RunTimes> times_on(const Cluster& cluster, const std::string& more = "") {
  std::vector<RunTimes> runs;
  for (const char* flags :
       {"--dp_size 2 --hidden_size 96 --ffn_hidden_size 256", "--tp_size 2 --hidden_size 192",
        "--pp_size 2 --seq_len 128 --grad_acc_steps 2 --ffn_hidden_size 512"}) {
    runs.push_back(times_of(flags + more, cluster));
  }
  return runs;
}

const CalibratedNumber& number(const Calibration& found, const std::string& key) {
  const auto at = std::ranges::find(found.numbers, key, &CalibratedNumber::key);
  REQUIRE(at != found.numbers.end());
  return *at;
}

TEST_CASE("a calibration finds the numbers that times were made with") {
  const Cluster truth = machine();
  const std::vector<RunTimes> runs = times_on(truth);
  const Calibration found = calibrate(read_cluster("two_cores"), runs);
  const std::vector<std::pair<const char*, double>> expected = {
      {"peak_tflops.f32", 0.08},     {"memory_gbs", 7},
      {"efficiency.attention", 0.2}, {"launch_us", 3},
      {"links.node.latency_us", 35}, {"links.node.gbs", 0.6}};
  for (const auto& [key, value] : expected) {
    CAPTURE(key);
    CHECK(number(found, key).value == Approx(value).epsilon(0.12));  // lengths make up for a peak
    REQUIRE(number(found, key).interval);
    CHECK(number(found, key).interval->first <= number(found, key).interval->second);
  }
  CHECK(found.ops_off < 0.01);
  CHECK(found.exchanges_off < 0.01);
  Cost before(truth), after(found.cluster);
  for (const RunTimes& run : runs) {
    for (const RunTimes::Op& op : run.ops) {
      CAPTURE(op.kernel.op);
      CHECK(after.of(op.kernel) == Approx(before.of(op.kernel)).epsilon(0.05));
    }
  }
}

TEST_CASE("a calibrated number says how many events it rests on") {
  const std::vector<RunTimes> runs = times_on(machine());
  const Calibration found = calibrate(read_cluster("two_cores"), runs);
  int64_t products = 0, sent = 0, between = 0;
  for (const RunTimes& run : runs) {
    for (const RunTimes::Op& op : run.ops) {
      if (op.kernel.kind == KernelKind::matmul) products += op.events;
    }
    for (const RunTimes::Sent& one : run.sent) sent += one.events;
    between += run.between_them;
  }
  CHECK(number(found, "peak_tflops.f32").events == products);
  CHECK(number(found, "links.node.gbs").events == sent);
  CHECK(number(found, "launch_us").events == between);
  CHECK(found.cluster.node.gbs.origin == Origin::fitted);
  CHECK(found.cluster.node.gbs.from == fmt::format("{} exchanges inside a node of 3 runs", sent));
}

TEST_CASE("a link between nodes is found where runs cross it, and unknown where none does") {
  const Cluster start = read_cluster("two_cores");
  const Calibration inside = calibrate(start, times_on(machine()));
  CHECK(std::ranges::count(inside.unknown, "links.net.gbs") == 1);
  CHECK(std::ranges::count(inside.unknown, "peak_tflops.bf16") == 1);
  CHECK(inside.cluster.net.gbs.origin == Origin::unknown);
  Cluster apart = machine();
  apart.ranks_per_node.value = 1;
  const Calibration beyond = calibrate(start, times_on(apart));
  CHECK(number(beyond, "links.net.latency_us").value == Approx(90).epsilon(0.05));
  CHECK(number(beyond, "links.net.gbs").value == Approx(0.2).epsilon(0.05));
  CHECK(std::ranges::count(beyond.unknown, "links.node.gbs") == 1);
}

TEST_CASE("a search that needs an unknown number is refused with its name") {
  const auto unknown = [](const char* link) {
    return [=](Json& json) {
      json["links"][link]["gbs"]["source"] = "unknown";
      json["links"][link]["gbs"]["from"] = "no run has crossed it";
    };
  };
  const Json cluster = slow_cluster({unknown("net")});
  CHECK(tiny_answer(cluster, "--nodes 1")["best"].size() > 0);
  check_throws<UsageError>([&] { tiny_answer(cluster, "--nodes 2"); },
                           {"net.gbs is unknown", "no run has crossed it"});
  const Json within = slow_cluster({unknown("node")});
  check_throws<UsageError>([&] { tiny_answer(within, "--nodes 1"); }, {"node.gbs is unknown"});
  const Json peak =
      slow_cluster({[](Json& json) { json["peak_tflops"]["f32"]["source"] = "unknown"; }});
  check_throws<UsageError>([&] { tiny_answer(peak, "--nodes 1"); }, {"peak_tflops.f32 is unknown"});
}

TEST_CASE("where the host computes, an op begins when what it costs besides is over") {
  Cluster cluster = machine();
  const TrainConfig config = layout_of_flags(instead(kSmall, "--dtype f32"));
  const RankClasses classes = classes_of_ranks(config, 2);
  const std::vector<Program> programs = record_classes(config, classes);
  const auto step = [&](double launch_us) {
    cluster.launch_us.value = launch_us;
    Cost cost(cluster);
    return replay(programs, classes, cost).step;
  };
  const auto count = std::ranges::count_if(programs[0].events, [](const Event& event) {
    return event.kind == Event::compute || event.kind == Event::post;
  });
  CHECK(step(3) == Approx(step(0) + double(count) * 3e-6));
}

constexpr double kUs = 1e-6;

/// The files of a run on two ranks whose ops take 10 us of CPU each, with 2 us before each op and
/// exchange; exchanges take 102 us from when the later rank begins. The first four steps are ten
/// times as slow. A step ends with a wait that polls for 50 us. On a GPU an op takes as long in its
/// lane, 50 us later, and the host 1 us to launch it; once it finds the queue full for 5 ms.
class TracedRun {
 public:
  explicit TracedRun(const std::string& flags, int steps = 8, int64_t node_size = 0,
                     bool on_device = false)
      : on_device_(on_device) {
    std::vector<std::string> words = {"program"};
    std::istringstream stream(instead(kSmall, flags + " --dtype f32"));
    for (std::string word; stream >> word;) words.push_back(word);
    TrainConfig config;
    Args args("");
    read_command_line(config, args, words, /*ranks=*/2);
    std::ofstream(dir_.file("run.json"))
        << Json{{"config", Json::parse(args.to_json())}, {"machine", {{"ranks", 2}}}};
    Json groups = Json::object();
    for (int rank = 0; rank < 2; ++rank) {
      const Program program = record(config, rank);
      for (size_t i = 0; i < program.groups.size(); ++i) {
        groups[std::to_string(i)] = {{"name", program.groups[i].name},
                                     {"members", *program.groups[i].members}};
      }
      numbers_.clear();
      for (int step = 0; step < steps; ++step) add_step(program, rank, step);
    }
    events_.push_back({{"ph", "M"}, {"name", "thread_name"}, {"pid", 0}});
    std::ofstream(dir_.file("trace.json"))
        << Json{{"otherData", {{"ranks", 2}, {"node_size", node_size}, {"groups", groups}}},
                {"traceEvents", events_}};
  }

  std::string path() const { return std::filesystem::path(dir_.file("run.json")).parent_path(); }

 private:
  static constexpr double kStep = 1e6;  ///< microseconds from one step to the next

  Json& add(const char* category, const std::string& name, int rank, int step, double duration) {
    events_.push_back({{"ph", "X"},
                       {"cat", category},
                       {"name", name},
                       {"pid", rank},
                       {"tid", 0},
                       {"ts", now_},
                       {"dur", duration},
                       {"tts", now_},
                       {"tdur", duration},
                       {"args", {{"step", step}}}});
    return events_.back();
  }

  void add_step(const Program& program, int rank, int step) {
    const double slow = step < 4 ? 10 : 1, begin = step * kStep;
    now_ = begin;
    for (const Event& event : program.events) {
      if (event.kind != Event::compute && event.kind != Event::post) continue;
      now_ += 2 * slow;
      if (event.kind == Event::compute) {
        add_op(program.kernels[event.what], rank, step, slow);
      } else {
        add_exchange(program.exchanges[event.what], rank, step, slow);
      }
    }
    now_ += on_device_ ? 5000 : 0;
    add("wait", "wait all_reduce", rank, step, 50);
    now_ += 50;
    const double end = std::exchange(now_, begin);
    add("phase", "train_step", rank, step, end - begin);
  }

  void add_op(const Kernel& kernel, int rank, int step, double slow) {
    const double takes = on_device_ ? slow : 10 * slow;
    const auto add_amounts = [&](Json& args) {
      args["flops"] = kernel.flops;
      args["bytes"] = kernel.bytes;
    };
    add_amounts(add("op", kernel.op, rank, step, takes)["args"]);
    now_ += takes;
    if (!on_device_) return;
    const double queued = std::exchange(now_, now_ + 50);
    Json& in_lane = add("device op", kernel.op, rank, step, 10 * slow);
    in_lane["tid"] = 1000;
    in_lane["args"]["queued"] = queued;
    add_amounts(in_lane["args"]);
    add("device wait", "wait all_reduce", rank, step, 7)["tid"] = 1000;
    now_ = queued;
  }

  void add_exchange(const Exchange& exchange, int rank, int step, double slow) {
    const double at = std::exchange(now_, now_ + 5 * rank);
    Json& event = add("comm", "exchange", rank, step, (100 + 2 * rank) * slow);
    event["tid"] = 1;
    event["args"].update({{"group", exchange.group},
                          {"kind", name(exchange.kind)},
                          {"number", numbers_[exchange.group]++},
                          {"peer", exchange.peer},
                          {"payload_bytes", exchange.payload_bytes},
                          {"submitted", at}});
    now_ = at;
  }

  const TempDir dir_;
  const bool on_device_;
  std::vector<Json> events_;
  std::map<int, int64_t> numbers_;
  double now_ = 0;
};

TEST_CASE("a trace says what each op and exchange took, and what is between them") {
  const TracedRun run("--dp_size 2");
  const RunTimes times = read_run_times(run.path());
  CHECK(times.steps == 4);
  CHECK(times.ranks_per_node == 2);
  CHECK(read_run_times(TracedRun("--dp_size 2", 8, /*node_size=*/1).path()).ranks_per_node == 1);
  REQUIRE(!times.ops.empty());
  for (const RunTimes::Op& op : times.ops) CHECK(op.seconds == Approx(10 * kUs));
  CHECK(std::ranges::any_of(times.ops, [](const RunTimes::Op& op) { return op.kernel.k > 0; }));
  REQUIRE(!times.sent.empty());
  for (const RunTimes::Sent& sent : times.sent) {
    CHECK(sent.seconds <= Approx(102 * kUs));  // where rank 0 is later: 100
    CHECK(sent.seconds >= Approx(100 * kUs));
    CHECK(*sent.group.members == std::vector<int>{0, 1});
  }
  CHECK(times.between == Approx(2 * kUs));
}

TEST_CASE("of GPUs a trace says what ops took in their lanes, and what a launch costs the host") {
  const TracedRun run("--dp_size 2 --device cuda", 8, /*node_size=*/0, /*on_device=*/true);
  const RunTimes times = read_run_times(run.path());
  CHECK(times.on_device);
  CHECK(!read_run_times(TracedRun("--dp_size 2").path()).on_device);
  REQUIRE(!times.ops.empty());
  for (const RunTimes::Op& op : times.ops) CHECK(op.seconds == Approx(10 * kUs));
  for (const RunTimes::Sent& sent : times.sent) CHECK(sent.seconds <= Approx(102 * kUs));
  CHECK(times.between == Approx(3 * kUs));  // of most: others have an exchange between them

  const TempDir dir;
  TrainConfig config;
  config.search.cluster = "h100_nvl8";
  config.search.plan_runs = run.path();
  config.search.plan_out = dir.file("cards.json");
  CHECK(calibrate_cluster(config).find("launches") != std::string::npos);
  const Cluster cards = read_cluster(config.search.plan_out);
  CHECK(cards.launch_us.value == Approx(3));
  CHECK(cards.peak_tflops.at(DType::f32).origin == Origin::fitted);
  CHECK(cards.peak_tflops.at(DType::bf16).origin == Origin::unknown);
  CHECK(cards.node.gbs.origin == Origin::fitted);
}

TEST_CASE("traces of other programs, and those that are too short, are refused") {
  const auto refused = [](const TracedRun& run, const std::vector<std::string>& parts) {
    check_throws<UsageError>([&] { read_run_times(run.path()); }, parts);
  };
  refused(TracedRun("--dp_size 2", 4), {"4 whole steps", "first 4", "--trace_steps 14"});
  const TracedRun run("--dp_size 2"), other("--dp_size 2 --num_layers 2");
  std::filesystem::copy_file(run.path() + "/trace.json", other.path() + "/trace.json",
                             std::filesystem::copy_options::overwrite_existing);
  refused(other, {"op ", "of rank 0", "in a dry run of the same flags", "without experts"});
  std::ofstream(other.path() + "/trace.json") << "{\"otherData\": {}}";
  refused(other, {"is no trace of a run", "--trace_steps 14"});
  std::filesystem::remove(other.path() + "/trace.json");
  refused(other, {"no trace.json", "--trace_steps 14"});
}

TEST_CASE("a calibrated file is read again, and says what its numbers rest on") {
  const TracedRun run("--dp_size 2");
  const TempDir dir;
  TrainConfig config;
  config.search.cluster = "two_cores";
  config.search.plan_runs = run.path();
  config.search.plan_out = dir.file("mine.json");
  const std::string said = calibrate_cluster(config);
  CHECK(said.find("1 run, 4 steps") != std::string::npos);
  CHECK(said.find("unknown") != std::string::npos);
  const Cluster mine = read_cluster(config.search.plan_out);
  CHECK(mine.name == "mine");
  CHECK(mine.launch_us.value == Approx(2));
  CHECK(mine.launch_us.origin == Origin::fitted);
  CHECK(mine.net.gbs.origin == Origin::unknown);
  CHECK(mine.ranks_per_node.origin == Origin::assumed);
}

TEST_CASE("runs that cannot calibrate are refused in a line") {
  TrainConfig config;
  const TracedRun on_cpu("--dp_size 2"), on_gpu("--dp_size 2", 8, 0, /*on_device=*/true);
  config.search.cluster = "h100_nvl8";
  config.search.plan_runs = on_cpu.path();
  check_throws<UsageError>([&] { calibrate_cluster(config); },
                           {"h100_nvl8", on_cpu.path(), "of CPUs", "--cluster two_cores"});
  config.search.cluster = "two_cores";
  config.search.plan_runs = on_cpu.path() + "," + on_gpu.path();
  check_throws<UsageError>([&] { calibrate_cluster(config); },
                           {"two_cores", on_gpu.path(), "of GPUs", "--cluster h100_nvl8"});
  config.search.plan_runs = on_cpu.path() + "," + on_cpu.path() + "/.";
  check_throws<UsageError>([&] { calibrate_cluster(config); },
                           {"plan_runs=" + on_cpu.path(), "/. is there twice"});
  config.search.plan_runs = "nowhere";
  check_throws<UsageError>([&] { calibrate_cluster(config); },
                           {"plan_runs=nowhere", "run.json", "directories of runs"});
  check_throws<UsageError>([] { layout_of_flags("--plan_runs nowhere"); },
                           {"plan_runs", "--cluster"});
  check_throws<UsageError>(
      [] { layout_of_flags("--cluster h100_nvl8 --plan_runs nowhere --plan_rows t.csv"); },
      {"plan_runs and plan_rows", "leave out --plan_rows"});
}

}  // namespace
}  // namespace usp::test
