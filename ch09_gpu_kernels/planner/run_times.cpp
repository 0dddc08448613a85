#include "planner/run_times.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <tuple>

#include "base/check.h"
#include "base/json_reader.h"
#include "planner/cost.h"

namespace usp {

namespace {

using Json = nlohmann::json;

/// Flags that say where a run writes and what it is asked for, not what its steps do.
constexpr std::array<std::string_view, 5> kOther = {"Output", "Checkpoints", "Search", "Planning",
                                                    "Sampling"};

Json read_json(const std::string& run_dir, const char* file, const char* remedy) {
  const std::string path = std::filesystem::path(run_dir) / file;
  std::ifstream stream(path);
  if (!stream) usage_error("plan_runs={}: there is no {} in it; {}", run_dir, file, remedy);
  std::stringstream text;
  text << stream.rdbuf();
  try {
    return parse_json(text.str(), path);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

CommKind comm_kind(const std::string& text) {
  for (int kind = 0; kind <= int(CommKind::barrier); ++kind) {
    if (text == name(CommKind(kind))) return CommKind(kind);
  }
  usage_error("there is no operation {}; try all_reduce", in_quotes(text));
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// What one rank does in one step, in order.
struct RankStep {
  struct Slice {
    double begin, cpu_begin, cpu;  ///< seconds
    std::string op;
    int64_t flops, bytes;
    int64_t queued_ns = 0;  ///< when the main thread had queued all of it
    double device = 0;      ///< in the GPU's lane; 0: nothing is there
  };
  double begin = 0, end = 0, cpu = 0;  ///< of the step
  std::vector<Slice> ops;
  std::map<int64_t, double> device_ops;  ///< seconds of each in a GPU's lane, by when it was queued
  double waited_cpu = 0;
  int64_t posts = 0;
};

/// An operation that several ranks carry out together.
struct Together {
  Exchange exchange;
  std::vector<int> members;     ///< ranks of the world; of a message its sender first
  int64_t step = 0;             ///< in which it was posted
  double begun = 0, ended = 0;  ///< by the last
  int64_t ranks = 0;            ///< of which there is a record
};

/// A trace, sorted by rank and step.
class TraceReader {
 public:
  explicit TraceReader(const std::string& run_dir)
      : source_(std::filesystem::path(run_dir) / "trace.json") {
    const Json json = read_json(run_dir, "trace.json", kRemedy);
    try {
      const Json& facts = json.at("otherData");
      ranks = facts.at("ranks");
      const int64_t node_size = facts.at("node_size");
      ranks_per_node = node_size > 0 ? std::min(node_size, ranks) : ranks;
      groups_ = facts.at("groups");
      for (const Json& event : json.at("traceEvents")) {
        if (event.at("ph") == "X" && event.at("name") == "train_step") begin_step(event);
      }
      for (const Json& event : json.at("traceEvents")) {
        if (event.at("ph") == "X") take(event);
      }
    } catch (const Json::exception& error) {
      usage_error("{} is no trace of a run: {}; {}", source_, error.what(), kRemedy);
    }
    leave_out_warm_up();
  }

  int64_t ranks = 0, ranks_per_node = 0;
  bool on_device = false;
  std::map<int64_t, std::map<int64_t, RankStep>> steps;  ///< by number, by rank
  std::map<std::tuple<int64_t, std::vector<int>, int64_t, bool>, Together> together;

 private:
  static constexpr const char* kRemedy = "run with --trace_steps 14";

  static double seconds(const Json& us) { return us.get<double>() * 1e-6; }
  /// Exactly: files have microseconds with three decimals.
  static int64_t nanoseconds(const Json& us) { return std::llround(us.get<double>() * 1e3); }

  void begin_step(const Json& event) {
    if (event.at("cat") != "phase") return;
    const int64_t rank = event.at("pid"), number = event.at("args").at("step");
    RankStep& step = steps[number][rank];
    step.begin = seconds(event.at("ts"));
    step.end = step.begin + seconds(event.at("dur"));
    step.cpu = seconds(event.at("tdur"));
    begins_[rank][step.begin] = &step;
  }

  /// The step of a rank at this time; nullptr: it is between two, as in a validation.
  RankStep* step_at(int64_t rank, double time) {
    const auto& begins = begins_[rank];
    auto next = begins.upper_bound(time);
    if (next == begins.begin()) return nullptr;
    RankStep* const step = std::prev(next)->second;
    return time <= step->end ? step : nullptr;
  }

  void take(const Json& event) {
    const std::string category = event.at("cat");
    if (category == "device op") return take_device_op(event);
    if (category.starts_with("device")) return;
    const Json& args = event.at("args");
    const int64_t rank = event.at("pid");
    if (category == "comm") {
      RankStep* const step = step_at(rank, seconds(args.at("submitted")));
      if (step == nullptr) return;
      ++step->posts;
      return carry_out(event);
    }
    const double begin = seconds(event.at("ts"));
    RankStep* const step = step_at(rank, begin);
    if (step == nullptr) return;
    if (category == "wait") {
      step->waited_cpu += seconds(event.at("tdur"));
    } else if (category == "op") {
      step->ops.push_back({begin, seconds(event.value("tts", Json(0))), seconds(event.at("tdur")),
                           event.at("name").get<std::string>(), args.value("flops", int64_t{0}),
                           args.value("bytes", int64_t{0}),
                           nanoseconds(event.at("ts")) + nanoseconds(event.at("dur"))});
    }
  }

  // [device]
  /// What a GPU did of the op that the main thread had queued by then.
  void take_device_op(const Json& event) {
    on_device = true;
    const Json& queued = event.at("args").at("queued");
    RankStep* const step = step_at(event.at("pid"), seconds(queued));
    if (step == nullptr) return;
    step->device_ops[nanoseconds(queued)] += seconds(event.at("dur"));
  }

  /// Gives the times in GPUs' lanes to the ops that the main threads queued.
  static void give_device_times(RankStep& step) {
    for (RankStep::Slice& op : step.ops) {
      const auto found = step.device_ops.find(op.queued_ns);
      if (found != step.device_ops.end()) op.device = found->second;
    }
  }
  // [device]

  void carry_out(const Json& event) {
    const Json& args = event.at("args");
    const int rank = event.at("pid"), peer = args.at("peer");
    const int64_t number = args.at("number"), group = args.at("group");
    const CommKind kind = comm_kind(args.at("kind").get<std::string>());
    std::vector<int> members = members_of(group, rank);
    const bool is_message = kind == CommKind::send || kind == CommKind::recv;
    if (is_message) {
      members = {rank, members.at(peer)};
      if (kind == CommKind::recv) std::swap(members[0], members[1]);
    }
    Together& found = together[{group, members, number, is_message}];
    found.exchange = {.kind = is_message ? CommKind::send : kind,
                      .peer = is_message ? 1 : -1,
                      .payload_bytes = args.at("payload_bytes").get<int64_t>()};
    found.members = members;
    found.step = args.at("step");
    found.begun = std::max(found.begun, seconds(event.at("ts")));
    found.ended = std::max(found.ended, seconds(event.at("ts")) + seconds(event.at("dur")));
    ++found.ranks;
  }

  std::vector<int> members_of(int64_t group, int rank) const {
    const Json& members = groups_.at(std::to_string(group)).at("members");
    if (members.empty() || !members.front().is_array()) return members;
    for (const Json& some : members) {
      const std::vector<int> ranks_of_it = some;
      if (std::ranges::find(ranks_of_it, rank) != ranks_of_it.end()) return ranks_of_it;
    }
    usage_error("{}: rank {} is in no group {}; {}", source_, rank, group, kRemedy);
  }

  void leave_out_warm_up() {
    std::erase_if(steps, [&](const auto& step) { return std::ssize(step.second) < ranks; });
    const int64_t traced = std::ssize(steps);
    for (int64_t i = 0; i < kWarmUpSteps && !steps.empty(); ++i) steps.erase(steps.begin());
    if (steps.empty()) {
      usage_error("{} has {} whole steps, and the first {} are left out; {}", source_, traced,
                  kWarmUpSteps, kRemedy);
    }
    std::erase_if(together, [&](const auto& entry) {
      const Together& one = entry.second;
      return one.ranks < std::ssize(one.members) || !steps.contains(one.step);
    });
    for (auto& [number, of_ranks] : steps) {
      for (auto& [rank, step] : of_ranks) {
        std::ranges::sort(step.ops, {}, &RankStep::Slice::begin);
        if (on_device) give_device_times(step);
      }
    }
  }

  std::string source_;
  Json groups_;
  std::map<int64_t, std::map<double, RankStep*>> begins_;  ///< by rank
};

/// What came with the same key: seconds, and how many events they are of.
template <class Key>
using Samples = std::map<Key, std::pair<std::vector<double>, int64_t>>;

template <class Key>
void add_sample(Samples<Key>& samples, const Key& key, double seconds, int64_t events) {
  auto& [all, count] = samples[key];
  all.push_back(seconds);
  count += events;
}

/// Times of a step's ops go to the kernels that a dry run has in the same places.
void pair_ops(const Program& program, const RankStep& step, const std::string& run_dir,
              bool on_device, Samples<Kernel>& samples) {
  std::map<Kernel, std::pair<double, int64_t>> of_step;
  size_t at = 0;
  const auto differ = [&](const std::string& traced, const std::string& dry) {
    usage_error(
        "plan_runs={}: op {} of a step of rank {} is {}, and {} in a dry run of the same flags: "
        "calibrate with runs of this chapter whose shapes do not follow from data, without experts",
        run_dir, at + 1, program.rank, traced, dry);
  };
  const auto words = [](const std::string& op, int64_t flops, int64_t bytes) {
    return fmt::format("{} of {} operations on {} bytes", op, flops, bytes);
  };
  for (const Event& event : program.events) {
    if (event.kind != Event::compute) continue;
    const Kernel& kernel = program.kernels[event.what];
    const std::string dry = words(kernel.op, kernel.flops, kernel.bytes);
    if (at == step.ops.size()) differ("missing", dry);
    const RankStep::Slice& op = step.ops[at];
    if (op.op != kernel.op || op.flops != kernel.flops || op.bytes != kernel.bytes) {
      differ(words(op.op, op.flops, op.bytes), dry);
    }
    ++at;
    if (on_device && op.device == 0) continue;  // of an empty part, which no GPU was asked for
    auto& [seconds, count] = of_step[kernel];
    seconds += on_device ? op.device : op.cpu;
    ++count;
  }
  if (at < step.ops.size()) differ(step.ops[at].op, "not there");
  for (const auto& [kernel, sum] : of_step) {
    add_sample(samples, kernel, sum.first / double(sum.second), sum.second);
  }
}

// [launches]
/// Seconds on the host's CPU clock from one op's launch to the next one's, the median: a launch
/// that waits for room in the GPU's queue, or for its result, is none.
double between_launches(const RankStep& step) {
  std::vector<double> between;
  for (size_t i = 0; i + 1 < step.ops.size(); ++i) {
    between.push_back(step.ops[i + 1].cpu_begin - step.ops[i].cpu_begin);
  }
  return between.empty() ? 0 : std::max(0.0, median(std::move(between)));
}
// [launches]

/// The same beside ops and waits, where the host computes.
double between_ops(const RankStep& step) {
  double computed = 0;
  for (const RankStep::Slice& op : step.ops) computed += op.cpu;
  const auto count = double(std::ssize(step.ops) + step.posts);
  return std::max(0.0, step.cpu - step.waited_cpu - computed) / count;
}

}  // namespace

TrainConfig config_of_run(const std::string& run_dir) {
  const Json json = read_json(run_dir, "run.json", "give directories of runs that have ended");
  TrainConfig config;
  Args args("");
  config.bind(args);
  const char* const word = "calibrate";
  args.parse(1, &word);
  try {
    const Json& flags = json.at("config");
    const std::string model = flags.value("model", "");
    const bool is_directory = std::filesystem::is_directory(model);
    for (const auto& [flag, value] : flags.items()) {
      const std::string group = args.group_of(flag);
      const bool of_model = group == "Model";
      if (std::ranges::find(kOther, group) != kOther.end() || flag == "world_size") continue;
      if (of_model && is_directory && flag != "model") continue;  // its config.json decides
      args.take(flag, value.dump(), of_model);
    }
    config.communication->ranks = json.at("machine").at("ranks").get<int64_t>();
  } catch (const Json::exception& error) {
    usage_error("plan_runs={}: run.json is no record of a run: {}; run again", run_dir,
                error.what());
  }
  config.validate(args);
  return config;
}

RunTimes read_run_times(const std::string& run_dir) {
  const TrainConfig config = config_of_run(run_dir);
  const TraceReader trace(run_dir);
  RunTimes times;
  times.on_device = trace.on_device;
  times.ranks_per_node = trace.ranks_per_node;
  times.steps = std::ssize(trace.steps);
  Samples<Kernel> ops;
  std::vector<double> between;
  for (int rank = 0; rank < trace.ranks; ++rank) {
    const Program program = record(config, rank);
    for (const auto& [number, of_ranks] : trace.steps) {
      const RankStep& step = of_ranks.at(rank);
      pair_ops(program, step, run_dir, trace.on_device, ops);
      between.push_back(trace.on_device ? between_launches(step) : between_ops(step));
      times.between_them += std::ssize(step.ops) + (trace.on_device ? 0 : step.posts);
    }
  }
  times.between = median(between);
  for (const auto& [kernel, found] : ops) {
    times.ops.push_back({kernel, median(found.first), found.second});
  }
  Samples<std::pair<std::vector<int>, Exchange>> sent;
  for (const auto& [key, one] : trace.together) {
    add_sample(sent, {one.members, one.exchange}, one.ended - one.begun, 1);
  }
  for (const auto& [shape, found] : sent) {
    ProgramGroup group{.name = "",
                       .members = std::make_shared<const std::vector<int>>(shape.first)};
    times.sent.push_back(
        {shape.second, std::move(group), std::ranges::min(found.first), found.second});
  }
  return times;
}

}  // namespace usp
