#include "planner/timed.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "accounting/memory.h"
#include "pipeline_parallel/simulate_schedule.h"
#include "planner/shared_replay.h"
#include "planner/timeline.h"

namespace usp {

namespace {

double on(double from, double to, double times) { return from + times * (to - from); }

/// The same of what has names; a name that one of them lacks is 0 there.
std::map<std::string, double> on(const std::map<std::string, double>& from,
                                 const std::map<std::string, double>& to, double times) {
  std::map<std::string, double> result;
  for (const auto& [name, seconds] : from) result[name] = on(seconds, 0, times);
  for (const auto& [name, seconds] : to) result[name] += times * seconds;
  return result;
}

/// Goes on from a to b and beyond: a, and `times` times the difference between b and a. Peaks of
/// memory go on if each micro-batch `piles_up`; else a's and b's are what there is.
Replayed go_on(const Replayed& a, const Replayed& b, double times, bool piles_up) {
  Replayed result = b;
  result.step = on(a.step, b.step, times);
  result.gradients = on(a.gradients, b.gradients, times);
  for (int i = 0; i < kResources; ++i) {
    result.critical[i] = on(a.critical[i], b.critical[i], times);
  }
  for (size_t i = 0; i < a.classes.size(); ++i) {
    const RankTime &from = a.classes[i], &to = b.classes[i];
    RankTime& time = result.classes[i];
    time.computes = on(from.computes, to.computes, times);
    time.starves = on(from.starves, to.starves, times);
    time.gradients = on(from.gradients, to.gradients, times);
    time.exposed = on(from.exposed, to.exposed, times);
    time.parts = on(from.parts, to.parts, times);
    time.peak = piles_up ? std::llround(on(double(from.peak), double(to.peak), times))
                         : std::max(from.peak, to.peak);
  }
  return result;
}

}  // namespace

double FoldedStep::seconds(const Cluster& cluster) {
  Cost cost(cluster);
  std::vector<double> each;
  for (ScheduleReplay& run : runs_) {
    run.price(cost);
    each.push_back(run.time().step);
  }
  return each.size() == 1 ? each[0] : on(each[0], each[1], times_);
}

// [recorded]
RecordedStep::RecordedStep(Candidate candidate, int64_t ranks_per_node, SegmentRecords& records,
                           bool all)
    : candidate_(std::move(candidate)),
      classes_(classes_of_ranks(candidate_.config, ranks_per_node)) {
  TrainConfig config = candidate_.config;
  const int64_t m = config.grad_acc_steps, p = config.pipeline.pp_size;
  const int64_t few = steady_micro_batches(config), more = few + p;
  std::vector<int64_t> micro_batches = {m};
  if (!all && m > more) {
    micro_batches = {few, more};
    times_ = double(m - few) / double(p);
    const auto in_flight = [&](int64_t of) {
      return simulate_schedule(config.pipeline.schedule(of), {1, 1, 1}).most_in_flight;
    };
    piles_up_ = in_flight(few) != in_flight(more);
  }
  runs_.resize(micro_batches.size());
  for (size_t i = runs_.size(); i-- > 0;) {  // the longer one may have what the shorter one lacks
    config.grad_acc_steps = micro_batches[i];
    runs_[i] = records.programs(config, classes_);
  }
}

Timed RecordedStep::time(const Cluster& cluster) const {
  Cost cost(cluster);
  std::vector<Replayed> each;
  Timed timed{candidate_, {}, classes_, {}, {}};
  for (const std::vector<Program>& programs : runs_) {
    each.push_back(replay(programs, classes_, cost));
    timed.paths.push_back(each.back().path);
  }
  timed.replayed = each.size() == 1 ? each[0] : go_on(each[0], each[1], times_, piles_up_);
  timed.origins = cost.origins();
  return timed;
}

double RecordedStep::shared(const Cluster& cluster) const {
  Cost cost(cluster);
  std::vector<double> each;
  for (const std::vector<Program>& programs : runs_) {
    each.push_back(shared_step(programs, classes_, cost, {.beside = cluster.beside.value}));
  }
  return each.size() == 1 ? each[0] : on(each[0], each[1], times_);
}

std::string RecordedStep::timeline(const Cluster& cluster) const {
  Cost cost(cluster);
  return usp::timeline(runs_.front(), classes_, cost);
}

FoldedStep RecordedStep::fold() const {
  std::vector<ScheduleReplay> folded;
  for (const std::vector<Program>& programs : runs_) folded.emplace_back(programs, classes_);
  return {std::move(folded), times_};
}

double RecordedStep::along(const Timed& other, const Cluster& cluster) const {
  Cost cost(cluster);
  std::vector<double> seconds;
  for (size_t i = 0; i < runs_.size(); ++i) {
    const ResourceSeconds of = seconds_of(other.paths[i], runs_[i], cost);
    seconds.push_back(std::accumulate(of.begin(), of.end(), 0.0));
  }
  return seconds.size() == 1 ? seconds[0] : on(seconds[0], seconds[1], times_);
}
// [recorded]

Timed time_step(const Candidate& candidate, const Cluster& cluster, SegmentRecords& records,
                bool all) {
  return RecordedStep(candidate, static_cast<int64_t>(cluster.ranks_per_node.value), records, all)
      .time(cluster);
}

Timed time_step(const Candidate& candidate, const Cluster& cluster, bool all) {
  SegmentRecords records;
  return time_step(candidate, cluster, records, all);
}

double Timed::gib() const {
  return double(std::ranges::max(replayed.classes, {}, &RankTime::peak).peak) / (1 << 30);
}

int Timed::fullest() const { return std::ranges::max(replayed.classes, {}, &RankTime::peak).rank; }

double Timed::tokens_per_second() const {
  return double(candidate.config.tokens_per_step()) / replayed.step;
}

double Timed::mfu(const Cluster& cluster) const {
  const TrainConfig& config = candidate.config;
  const double needed =
      tokens_per_second() * model_flops_per_token(config.model, double(config.seq_len));
  const double peak = cluster.peak_tflops.at(parse_dtype(config.dtype)).value * 1e12;
  return needed / (double(config.mesh().ranks()) * peak);
}

}  // namespace usp
