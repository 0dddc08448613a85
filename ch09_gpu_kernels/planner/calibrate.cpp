#include "planner/calibrate.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "base/check.h"
#include "base/file_writer.h"
#include "planner/cost.h"
#include "planner/fit.h"
#include "planner/nccl_tests.h"

namespace usp {

namespace {

using Runs = std::vector<const RunTimes*>;

constexpr std::string_view kUnknown = "no calibrated run says anything about it";

// [nics]
/// The cluster as a run had divided it into nodes. A GPU keeps its share of the NICs where others
/// of its node do nothing.
Cluster of_run(Cluster cluster, const RunTimes& run) {
  const auto ranks = double(run.ranks_per_node);
  if (run.on_device) cluster.nics_per_node.value *= ranks / cluster.ranks_per_node.value;
  cluster.ranks_per_node.value = ranks;
  return cluster;
}
// [nics]

bool is_near(const RunTimes& run, const RunTimes::Sent& sent) {
  return layout_of(*sent.group.members, run.ranks_per_node).nodes == 1;
}

// [off]
/// How far predicted times are from measured ones: the parts that are off, weighted by the time
/// that they take, and the sum of all.
class Off {
 public:
  void add(double predicted, double measured, int64_t events) {
    const double takes = measured * double(events);
    if (predicted > 0) parts_ += takes * soft(predicted, measured);  // of an empty part it is 0
    off_ += takes * std::abs(predicted / measured - 1);
    predicted_ += predicted * double(events);
    measured_ += takes;
  }
  double error() const {
    return measured_ == 0 ? 0 : parts_ / measured_ + soft(predicted_, measured_);
  }
  double mean() const { return measured_ == 0 ? 0 : off_ / measured_; }

 private:
  double parts_ = 0, off_ = 0, predicted_ = 0, measured_ = 0;
};
// [off]

void add_op_times(const RunTimes& run, const Cluster& cluster, Off& off) {
  Cost cost(cluster);
  for (const RunTimes::Op& op : run.ops) {
    if (op.seconds > 0) off.add(cost.of(op.kernel), op.seconds, op.events);
  }
}

void add_sent_times(const RunTimes& run, const Cluster& cluster, bool near, Off& off) {
  const Cluster used = of_run(cluster, run);
  Cost cost(used);
  for (const RunTimes::Sent& sent : run.sent) {
    if (is_near(run, sent) != near || sent.seconds <= 0) continue;
    off.add(cost.of(sent.exchange, sent.group).arrives, sent.seconds, sent.events);
  }
}

/// What runs have timed that a number rests on.
struct Evidence {
  std::string of;
  std::function<int64_t(const Runs&)> events;
};

Evidence all_of(KernelKind kind, std::optional<DType> dtype = {}) {
  const char* const what = kind == KernelKind::matmul      ? "products"
                           : kind == KernelKind::attention ? "ops of attention"
                                                           : "other ops";
  return {what, [kind, dtype](const Runs& runs) {
            int64_t events = 0;
            for (const RunTimes* run : runs) {
              for (const RunTimes::Op& op : run->ops) {
                const bool counts = op.kernel.kind == kind && (!dtype || op.kernel.dtype == *dtype);
                if (counts) events += op.events;
              }
            }
            return events;
          }};
}

Evidence all_sent(bool near) {
  return {near ? "exchanges inside a node" : "exchanges between nodes", [near](const Runs& runs) {
            int64_t events = 0;
            for (const RunTimes* run : runs) {
              for (const RunTimes::Sent& sent : run->sent) {
                if (is_near(*run, sent) == near) events += sent.events;
              }
            }
            return events;
          }};
}

std::set<DType> multiplied(const Runs& runs) {
  std::set<DType> dtypes;
  for (const RunTimes* run : runs) {
    for (const RunTimes::Op& op : run->ops) {
      if (op.kernel.kind == KernelKind::matmul) dtypes.insert(op.kernel.dtype);
    }
  }
  return dtypes;
}

double fastest_product(const Runs& runs, DType dtype) {
  double most = 1e-6;
  for (const RunTimes* run : runs) {
    for (const RunTimes::Op& op : run->ops) {
      const bool counts = op.kernel.kind == KernelKind::matmul && op.kernel.dtype == dtype;
      if (counts && op.seconds > 0)
        most = std::max(most, double(op.kernel.flops) / op.seconds * 1e-12);
    }
  }
  return most;
}

Knob of_cluster(std::string name, double minimum, double maximum, double start,
                Sourced Cluster::*member) {
  return {std::move(name), minimum, maximum, start,
          [member](Cluster& cluster) -> Sourced& { return cluster.*member; }};
}

/// Numbers that are fitted together, to the same events.
struct KnobGroup {
  std::vector<Knob> knobs;
  std::vector<Evidence> rest_on;  ///< each
  std::function<void(const RunTimes&, const Cluster&, Off&)> off;
};

KnobGroup knobs_of_ops(const Runs& runs) {
  KnobGroup group;
  group.off = add_op_times;
  const auto add = [&](Knob knob, const Evidence& rests_on) {
    if (rests_on.events(runs) == 0) return;
    group.knobs.push_back(std::move(knob));
    group.rest_on.push_back(rests_on);
  };
  for (const DType dtype : multiplied(runs)) {
    const double start = fastest_product(runs, dtype);
    add({fmt::format("peak_tflops.{}", name(dtype)), start / 4, start * 4, start,
         [dtype](Cluster& cluster) -> Sourced& { return cluster.peak_tflops[dtype]; }},
        all_of(KernelKind::matmul, dtype));
  }
  const Evidence products = all_of(KernelKind::matmul);
  add(of_cluster("efficiency.half_width", 0.01, 1e4, 16, &Cluster::half_width), products);
  add(of_cluster("efficiency.half_depth", 0.01, 1e4, 16, &Cluster::half_depth), products);
  add(of_cluster("efficiency.attention", 1e-3, 1, 0.3, &Cluster::attention),
      all_of(KernelKind::attention));
  add(of_cluster("memory_gbs", 1e-3, 1e6, 10, &Cluster::memory_gbs), all_of(KernelKind::memory));
  return group;
}

KnobGroup knobs_of_link(const Runs& runs, bool near) {
  ClusterLink Cluster::*const link = near ? &Cluster::node : &Cluster::net;
  const std::string key = near ? "links.node." : "links.net.";
  const Evidence sent = all_sent(near);
  KnobGroup group;
  if (sent.events(runs) == 0) return group;
  group.knobs = {{key + "latency_us", 1e-3, 1e6, 20,
                  [link](Cluster& cluster) -> Sourced& { return (cluster.*link).latency_us; }},
                 {key + "gbs", 1e-6, 1e6, 1,
                  [link](Cluster& cluster) -> Sourced& { return (cluster.*link).gbs; }}};
  group.rest_on = {sent, sent};
  group.off = [near](const RunTimes& run, const Cluster& cluster, Off& off) {
    add_sent_times(run, cluster, near, off);
  };
  return group;
}

Cluster fit_group(const Cluster& cluster, const KnobGroup& group, const Runs& runs) {
  return fit(begin_at(cluster, group.knobs), group.knobs, [&](const Cluster& tried) {
    double sum = 0;  // each run counts alike
    for (const RunTimes* run : runs) {
      Off off;
      group.off(*run, tried, off);
      sum += off.error();
    }
    return sum;
  });
}

int64_t between_them(const Runs& runs) {
  return std::accumulate(runs.begin(), runs.end(), int64_t{0},
                         [](int64_t sum, const auto* run) { return sum + run->between_them; });
}

/// Microseconds between two ops, over all of the runs' ops.
double between_us(const Runs& runs) {
  double seconds = 0;
  for (const RunTimes* run : runs) seconds += run->between * double(run->between_them);
  return 1e6 * seconds / double(between_them(runs));
}

/// What the numbers are where all runs count.
Cluster calibrated(const Cluster& start, const std::vector<KnobGroup>& groups, const Runs& runs) {
  Cluster cluster = start;
  for (const KnobGroup& group : groups) {
    if (!group.knobs.empty()) cluster = fit_group(cluster, group, runs);
  }
  if (between_them(runs) > 0) cluster.launch_us.value = between_us(runs);
  return cluster;
}

/// By definition: products and memory reach the peak and the bandwidth that are fitted.
Cluster with_fitted_peaks(Cluster cluster) {
  for (Sourced* one : {&cluster.matmul, &cluster.memory}) {
    *one = {1, Origin::fitted, "by definition: what they are a share of is fitted"};
  }
  return cluster;
}

/// Whether some of them have ops: of tables of exchanges alone nothing follows about these.
bool traced(const Runs& runs) {
  return !std::ranges::all_of(runs, [](const RunTimes* run) { return run->is_table; });
}

// [unknown]
/// Nothing is said of what no run has used.
void forget_what_is_unknown(Calibration& found, const Runs& runs) {
  const auto forget = [&](const std::string& key, Sourced& number) {
    number.origin = Origin::unknown;
    number.from = kUnknown;
    found.unknown.push_back(key);
  };
  const std::set<DType> dtypes = multiplied(runs);
  for (auto& [dtype, peak] : found.cluster.peak_tflops) {
    if (traced(runs) && !dtypes.contains(dtype)) {
      forget(fmt::format("peak_tflops.{}", name(dtype)), peak);
    }
  }
  if (traced(runs) && all_of(KernelKind::attention).events(runs) == 0) {
    forget("efficiency.attention", found.cluster.attention);
  }
  for (const bool near : {true, false}) {
    if (all_sent(near).events(runs) > 0) continue;
    ClusterLink& link = near ? found.cluster.node : found.cluster.net;
    const std::string key = near ? "links.node." : "links.net.";
    forget(key + "latency_us", link.latency_us);
    forget(key + "gbs", link.gbs);
  }
}
// [unknown]

Runs without(const Runs& runs, size_t left_out) {
  Runs kept = runs;
  kept.erase(kept.begin() + int64_t(left_out));
  return kept;
}

}  // namespace

Calibration calibrate(const Cluster& start, const std::vector<RunTimes>& all) {
  Runs runs;
  for (const RunTimes& run : all) runs.push_back(&run);
  const std::vector<KnobGroup> groups = {knobs_of_ops(runs), knobs_of_link(runs, /*near=*/true),
                                         knobs_of_link(runs, /*near=*/false)};
  const Cluster begin = traced(runs) ? with_fitted_peaks(start) : start;
  Calibration found;
  found.cluster = calibrated(begin, groups, runs);
  std::vector<Cluster> folds;
  for (size_t i = 0; i < runs.size() && runs.size() > 1; ++i) {
    folds.push_back(calibrated(begin, groups, without(runs, i)));
  }
  const auto add = [&](const Knob& knob, const Evidence& evidence) {
    Sourced& number = knob.of(found.cluster);
    CalibratedNumber& added = found.numbers.emplace_back();
    added.key = knob.name;
    added.value = number.value;
    added.events = evidence.events(runs);
    added.of = evidence.of;
    for (size_t i = 0; i < folds.size(); ++i) {
      if (evidence.events(without(runs, i)) == 0) continue;
      const double value = knob.of(folds[i]).value;
      if (!added.interval) added.interval = {value, value};
      added.interval->first = std::min(added.interval->first, value);
      added.interval->second = std::max(added.interval->second, value);
    }
    number.origin = Origin::fitted;
    number.from = fmt::format("{} {} of {} run{}", added.events, added.of, runs.size(),
                              runs.size() == 1 ? "" : "s");
  };
  for (const KnobGroup& group : groups) {
    for (size_t i = 0; i < group.knobs.size(); ++i) add(group.knobs[i], group.rest_on[i]);
  }
  if (traced(runs)) {
    const bool on_device = all.front().on_device;
    add(of_cluster("launch_us", 0, 1e6, 0, &Cluster::launch_us),
        {on_device ? "launches" : "ops and exchanges", between_them});
  }
  forget_what_is_unknown(found, runs);
  Off ops, sent;
  for (const RunTimes* run : runs) {
    add_op_times(*run, found.cluster, ops);
    for (const bool near : {true, false}) {
      if (all_sent(near).events({run}) > 0) add_sent_times(*run, found.cluster, near, sent);
    }
  }
  found.ops_off = ops.mean();
  found.exchanges_off = sent.mean();
  return found;
}

namespace {

/// The start's file with other numbers.
void write_calibrated(const Calibration& found, const TrainConfig& config) {
  std::ifstream file(cluster_file(config.search.cluster));
  auto json = nlohmann::ordered_json::parse(file);
  const auto write = [&](std::string key, const Sourced& number) {
    std::ranges::replace(key, '.', '/');
    json[nlohmann::ordered_json::json_pointer("/" + key)] = {
        {"value", std::stod(fmt::format("{:.4g}", number.value))},
        {"source", std::string(name(number.origin))},
        {"from", number.from}};
  };
  const Cluster& cluster = found.cluster;
  json["name"] = std::filesystem::path(config.search.plan_out).stem().string();
  for (const auto& [dtype, peak] : cluster.peak_tflops) {
    write(fmt::format("peak_tflops.{}", name(dtype)), peak);
  }
  write("memory_gbs", cluster.memory_gbs);
  write("efficiency.matmul", cluster.matmul);
  write("efficiency.attention", cluster.attention);
  write("efficiency.memory", cluster.memory);
  write("efficiency.half_width", cluster.half_width);
  write("efficiency.half_depth", cluster.half_depth);
  write("launch_us", cluster.launch_us);
  for (const auto& [key, link] : {std::pair{"node", &cluster.node}, {"net", &cluster.net}}) {
    write(fmt::format("links.{}.latency_us", key), link->latency_us);
    write(fmt::format("links.{}.gbs", key), link->gbs);
  }
  write_file(config.search.plan_out, json.dump(2) + "\n");
}

std::string counted(int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string describe(const std::vector<RunTimes>& runs) {
  int64_t steps = 0, tables = 0;
  for (const RunTimes& run : runs) steps += run.steps, tables += run.is_table;
  const int64_t traces = std::ssize(runs) - tables;
  const std::string of_tables = counted(tables, "table") + " of nccl-tests";
  if (traces == 0) return of_tables;
  return fmt::format("{}, {} steps; of each run the first {} steps are left out{}",
                     counted(traces, "run"), steps, kWarmUpSteps,
                     tables == 0 ? "" : "; " + of_tables);
}

std::string describe(const Calibration& found, const std::vector<RunTimes>& runs) {
  std::string text = fmt::format("{}\n\n{:<25}{:>11}{:>25}   {}\n", describe(runs), "", "fitted",
                                 "without one of the runs", "rests on");
  for (const CalibratedNumber& number : found.numbers) {
    const std::string interval =
        number.interval
            ? fmt::format("{:.4g} to {:.4g}", number.interval->first, number.interval->second)
            : "-";
    text += fmt::format("   {:<22}{:>11.4g}{:>25}   {} {}\n", number.key, number.value, interval,
                        number.events, number.of);
  }
  for (const std::string& key : found.unknown) {
    text +=
        fmt::format("   {:<22}{:>11}{:>25}   nothing: no search can use it\n", key, "unknown", "");
  }
  std::vector<std::string> off;
  if (found.ops_off > 0) off.push_back(fmt::format("ops {:.1f} %", 100 * found.ops_off));
  if (found.exchanges_off > 0) {
    off.push_back(fmt::format("exchanges {:.1f} %", 100 * found.exchanges_off));
  }
  if (!off.empty())
    text += fmt::format("\nOff by, in the mean over time: {}\n", fmt::join(off, ", "));
  return text;
}

[[noreturn]] void refuse_cluster(const TrainConfig& config, const std::string& run,
                                 const Cluster& cluster) {
  usage_error("cluster={}: {} is of {}, and in the cluster's file {} compute; try --cluster {}",
              config.search.cluster, run, cluster.host_computes ? "GPUs" : "CPUs",
              cluster.host_computes ? "hosts" : "GPUs",
              cluster.host_computes ? "h100_nvl8" : "two_cores");
}

}  // namespace

std::string calibrate_cluster(const TrainConfig& config) {
  const Cluster start = read_cluster(config.search.cluster);
  std::vector<RunTimes> runs;
  for (const std::string& run : split_files("plan_runs", config.search.plan_runs)) {
    const bool is_table = std::filesystem::is_regular_file(run);
    runs.push_back(is_table ? read_nccl_tests(run) : read_run_times(run));
    if (runs.back().on_device == start.host_computes) refuse_cluster(config, run, start);
  }
  const Calibration found = calibrate(start, runs);
  if (!config.search.plan_out.empty()) write_calibrated(found, config);
  return describe(found, runs);
}

}  // namespace usp
