#include "planner/timed.h"

#include <algorithm>

#include "accounting/memory.h"

namespace usp {

namespace {

Replayed record_and_replay(TrainConfig config, int64_t micro_batches, const RankClasses& classes,
                           Cost& cost) {
  config.grad_acc_steps = micro_batches;
  return replay(record_classes(config, classes), classes, cost);
}

/// As a and b, so many times their difference beyond a.
Replayed go_on(const Replayed& a, const Replayed& b, double times) {
  const auto on = [times](double from, double to) { return from + times * (to - from); };
  Replayed result = a;
  result.step = on(a.step, b.step);
  result.gradients = on(a.gradients, b.gradients);
  for (size_t i = 0; i < a.classes.size(); ++i) {
    const RankTime &from = a.classes[i], &to = b.classes[i];
    RankTime& time = result.classes[i];
    time.computes = on(from.computes, to.computes);
    time.starves = on(from.starves, to.starves);
    time.gradients = on(from.gradients, to.gradients);
    for (auto& [group, seconds] : time.exposed) {
      const auto found = to.exposed.find(group);
      seconds = on(seconds, found == to.exposed.end() ? 0 : found->second);
    }
  }
  return result;
}

}  // namespace

// [time_step]
Timed time_step(const Candidate& candidate, const Cluster& cluster, bool all) {
  const TrainConfig& config = candidate.config;
  Cost cost(cluster);
  Timed timed{candidate,
              {},
              classes_of_ranks(config, static_cast<int64_t>(cluster.ranks_per_node.value)),
              {}};
  const int64_t m = config.grad_acc_steps, p = config.pipeline.pp_size;
  const int64_t few = 2 * p + m % p, more = few + p;  // a steady step is between them
  const bool is_file = config.pipeline.pp_schedule.find_first_of("/.") != std::string::npos;
  if (all || is_file || m <= more) {
    timed.replayed = record_and_replay(config, m, timed.classes, cost);
  } else {
    const Replayed a = record_and_replay(config, few, timed.classes, cost);
    const Replayed b = record_and_replay(config, more, timed.classes, cost);
    timed.replayed = go_on(a, b, double(m - few) / double(p));
  }
  timed.origins = cost.origins();
  return timed;
}
// [time_step]

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
