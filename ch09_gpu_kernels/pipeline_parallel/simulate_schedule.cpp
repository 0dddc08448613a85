#include "pipeline_parallel/simulate_schedule.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <span>

#include "base/check.h"

namespace usp {

double WorkTimes::of(Work work) const {
  switch (work) {
    case Work::F:
      return forward;
    case Work::B:
      return input_gradient;
    case Work::W:
      return weight_gradient;
    case Work::BW:
      return input_gradient + weight_gradient;
  }
  return 0;
}

double SimulatedSchedule::bubble() const {
  const double work = std::accumulate(busy.begin(), busy.end(), 0.0);
  return makespan * double(busy.size()) / work - 1;
}

double SimulatedSchedule::inner_bubble() const {
  double span = 0;
  for (const auto& of_rank : intervals) span += of_rank.back().end - of_rank.front().begin;
  return span / std::accumulate(busy.begin(), busy.end(), 0.0) - 1;
}

namespace {

/// A schedule while its ranks go through it.
class Walk {
 public:
  Walk(const Schedule& schedule, const WorkTimes& times)
      : schedule_(schedule),
        times_(times),
        next_(schedule.actions.size()),
        free_(next_.size()),
        in_flight_(next_.size()),
        micro_batches_(micro_batches_of(schedule)),
        made_(2 * next_.size() * schedule.stages.chunks * micro_batches_, kNever) {
    result_.intervals.resize(next_.size());
    result_.busy.resize(next_.size());
    result_.most_in_flight.resize(next_.size());
  }

  /// Whether every rank gets to its end.
  bool run() {
    return run([](size_t, size_t, double) {});
  }

  /// The same; calls begins(rank, action, time) before each.
  template <class Begins>
  bool run(const Begins& begins) {
    bool moves = true;
    while (moves) {
      moves = false;
      for (size_t rank = 0; rank < next_.size(); ++rank) {
        while (const auto ready = ready_at(rank)) {
          begins(rank, next_[rank], *ready);
          take(rank, *ready);
          moves = true;
        }
      }
    }
    return !stuck();
  }

  /// A rank that has actions left.
  std::optional<size_t> stuck() const {
    for (size_t rank = 0; rank < next_.size(); ++rank) {
      if (next_[rank] < schedule_.actions[rank].size()) return rank;
    }
    return std::nullopt;
  }

  /// Who waits for whom, from one that is stuck on, until somebody comes twice or waits no longer.
  std::string who_waits() const {
    std::string text;
    std::vector<bool> seen(next_.size());
    for (size_t rank = *stuck(); !seen[rank] && !next_actions(rank).empty();) {
      seen[rank] = true;
      const size_t index = waiting(rank);
      const Action& action = schedule_.actions[rank][index];
      const Place from = *need(rank, action);
      text += fmt::format(
          "{}rank {} waits, in its action {}, {}, for the {} of micro-batch {} from "
          "rank {}",
          text.empty() ? "" : "; ", rank, index, to_text(action),
          action.work == Work::F ? "output" : "gradient", action.micro_batch, from.rank);
      rank = from.rank;
    }
    return text;
  }

  const SimulatedSchedule& result() const { return result_; }

  /// When what an action needs is there, if anybody has made it.
  std::optional<double> there_at(size_t rank, const Action& action) const {
    const std::optional<Place> from = need(rank, action);
    if (!from) return 0;
    const double made = made_[step_of(*from, action)];
    if (made == kNever) return std::nullopt;
    return made + (from->rank == int(rank) ? 0 : times_.message);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  static size_t micro_batches_of(const Schedule& schedule) {
    int64_t count = schedule.micro_batches;
    for (const auto& of_rank : schedule.actions) {
      for (const Action& action : of_rank) count = std::max(count, action.micro_batch + 1);
    }
    return size_t(count);
  }

  /// Number of an action's forward pass, or of its gradient of the input, in another place.
  size_t step_of(const Place& place, const Action& action) const {
    const int64_t chunk = place.rank * schedule_.stages.chunks + place.chunk;
    const bool backward = action.work != Work::F;
    return 2 * (chunk * micro_batches_ + action.micro_batch) + int64_t{backward};
  }

  /// Index of the action, among the next ones, for which nothing has come.
  size_t waiting(size_t rank) const {
    return next_[rank] + (there_at(rank, next_actions(rank)[0]) ? 1 : 0);
  }

  /// The stage that makes what an action reads, of the same micro-batch.
  std::optional<Place> need(size_t rank, const Action& action) const {
    const bool backward = action.work != Work::F;
    const Stages& stages = schedule_.stages;
    const int64_t stage = stages.stage_of({int(rank), action.chunk});
    const int64_t from = backward ? stage + 1 : stage - 1;
    if (action.work == Work::W || from < 0 || from == stages.count()) return std::nullopt;
    return stages.place_of(from, action.micro_batch, schedule_.micro_batches);
  }

  /// The next action, or those that run in turns.
  std::span<const Action> next_actions(size_t rank) const {
    const std::span<const Action> left = std::span(schedule_.actions[rank]).subspan(next_[rank]);
    return left.first(std::min<size_t>(left.size(), !left.empty() && left[0].with_next ? 2 : 1));
  }

  /// When they can begin.
  std::optional<double> ready_at(size_t rank) const {
    if (next_[rank] == schedule_.actions[rank].size()) return std::nullopt;
    double ready = free_[rank];
    for (const Action& action : next_actions(rank)) {
      const std::optional<double> there = there_at(rank, action);
      if (!there) return std::nullopt;
      ready = std::max(ready, *there);
    }
    return ready;
  }

  void take(size_t rank, double begin) {
    const std::span<const Action> actions = next_actions(rank);
    for (const Action& action : actions) {
      result_.intervals[rank].push_back({begin, begin + times_.of(action.work)});
      result_.busy[rank] += times_.of(action.work);
      begin += times_.of(action.work);
      in_flight_[rank] += action.work == Work::F;
    }
    result_.most_in_flight[rank] = std::max(result_.most_in_flight[rank], in_flight_[rank]);
    for (const Action& action : actions) {
      if (action.work != Work::W) {
        made_[step_of({int(rank), action.chunk}, action)] = begin;
      }
      in_flight_[rank] -= action.work == Work::W || action.work == Work::BW;
    }
    result_.makespan = std::max(result_.makespan, begin);
    free_[rank] = begin;
    next_[rank] += actions.size();
  }

  const Schedule& schedule_;
  const WorkTimes& times_;
  std::vector<size_t> next_;  ///< action of each rank
  std::vector<double> free_;  ///< when each rank is
  std::vector<int64_t> in_flight_;
  size_t micro_batches_;      ///< from 0 on, those of a wrong schedule that has more among them
  std::vector<double> made_;  ///< when each step was, by its number
  SimulatedSchedule result_;
};

}  // namespace

namespace {

bool can_take_turns(const Action& one, const Action& other) {
  const bool weights = one.work == Work::W || other.work == Work::W;
  return !weights && (one.work == Work::F) != (other.work == Work::F) && !other.with_next &&
         one.micro_batch != other.micro_batch;
}

}  // namespace

Schedule in_turns(Schedule schedule, const WorkTimes& times) {
  Walk walk(schedule, times);  // of the schedule as it becomes
  walk.run([&](size_t rank, size_t i, double begin) {
    std::vector<Action>& actions = schedule.actions[rank];
    if (i + 1 == actions.size() || !can_take_turns(actions[i], actions[i + 1])) return;
    const std::optional<double> there = walk.there_at(rank, actions[i + 1]);
    if (there && *there <= begin) actions[i].with_next = true;
  });
  return schedule;
}

void check_schedule(const Schedule& schedule, std::string_view name) {
  const Stages& stages = schedule.stages;
  const int64_t m = schedule.micro_batches;
  const bool halves = stages.placement != Placement::loop;
  if (halves && stages.chunks != 2) {
    usage_error("{}: a folded or mirrored pipeline has chunks 0 and 1 on every rank, not {}", name,
                stages.chunks);
  }
  if (stages.placement == Placement::mirror && (stages.ranks % 2 != 0 || m % 2 != 0)) {
    usage_error(
        "{}: a mirrored pipeline needs an even number of ranks and of micro-batches, not "
        "{} and {}; try {} and {}",
        name, stages.ranks, m, stages.ranks + stages.ranks % 2, m + m % 2);
  }
  for (int rank = 0; rank < stages.ranks; ++rank) {
    // Of chunk and micro-batch: forward, gradient of the input, of the weights.
    std::map<std::pair<int64_t, int64_t>, std::array<int, 3>> times;
    const auto refuse = [&](size_t index, const Action& action, std::string_view why) {
      usage_error("{}: rank {}, action {}, {}: {}", name, rank, index, to_text(action), why);
    };
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const Action& action = schedule.actions[rank][i];
      const auto& [work, micro_batch, chunk, with_next] = action;
      const int64_t stage = stages.stage_of({rank, chunk});
      if (stages.place_of(stage, micro_batch, m) != Place{rank, chunk}) {
        refuse(i, action, "this micro-batch passes the stage on the other rank that holds it");
      }
      std::array<int, 3>& done = times[{chunk, micro_batch}];
      const bool b = work == Work::B || work == Work::BW, w = work == Work::W || work == Work::BW;
      if ((work == Work::F && done[0] > 0) || (b && done[1] > 0) || (w && done[2] > 0)) {
        refuse(i, action, "a second time");
      }
      if (b && done[0] == 0) refuse(i, action, "before the forward pass, F");
      if (work == Work::W && done[1] == 0) refuse(i, action, "before the gradient of its input, B");
      done[0] += work == Work::F;
      done[1] += b;
      done[2] += w;
      if (!with_next) continue;
      const auto& actions = schedule.actions[rank];
      if (i + 1 == actions.size() || !can_take_turns(action, actions[i + 1])) {
        refuse(i, action,
               "in turns run two actions, a forward and a backward pass, of two micro-batches");
      }
    }
    for (int64_t chunk = 0; chunk < stages.chunks; ++chunk) {
      const int64_t stage = stages.stage_of({rank, chunk});
      for (int64_t i = 0; i < m; ++i) {
        if (stages.place_of(stage, i, m) != Place{rank, chunk}) continue;
        const std::array<int, 3>& done = times[{chunk, i}];
        for (const auto& [which, work] : {std::pair{0, Work::F}, {1, Work::B}, {2, Work::W}}) {
          if (done[which] == 0) {
            usage_error("{}: rank {}: {} is missing", name, rank, to_text({work, i, chunk}));
          }
        }
      }
    }
  }
  const WorkTimes unit;
  Walk walk(schedule, unit);
  if (!walk.run()) usage_error("{}: deadlock: {}", name, walk.who_waits());
}

bool deadlocks(const Schedule& schedule) {
  const WorkTimes unit;
  return !Walk(schedule, unit).run();
}

SimulatedSchedule simulate_schedule(const Schedule& schedule, const WorkTimes& times) {
  Walk walk(schedule, times);
  USP_CHECK(walk.run(), "deadlock: {}", walk.who_waits());
  return walk.result();
}

std::string to_report(const Schedule& schedule, const WorkTimes& times) {
  const SimulatedSchedule simulated = simulate_schedule(schedule, times);
  const auto& [placement, ranks, chunks] = schedule.stages;
  return fmt::format(
      "{}# {} stages on {} ranks, {} micro-batches\n"
      "# a step takes {:g}; a rank works {:g} of it on average: bubble {:.4g}\n"
      "# from its own first action to its own last: bubble {:.4g}\n"
      "# chunks in flight at most, by rank: {}\n",
      to_text(schedule), schedule.stages.count(), ranks, schedule.micro_batches, simulated.makespan,
      simulated.makespan / (1 + simulated.bubble()), simulated.bubble(), simulated.inner_bubble(),
      fmt::join(simulated.most_in_flight, " "));
}

std::string to_json(const Schedule& schedule, const WorkTimes& times) {
  const SimulatedSchedule simulated = simulate_schedule(schedule, times);
  const Stages& stages = schedule.stages;
  std::string ranks;
  int64_t passes_in_turns = 0;
  for (size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    passes_in_turns += 2 * std::ranges::count_if(schedule.actions[rank], &Action::with_next);
    std::string actions;
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const Action& action = schedule.actions[rank][i];
      const auto [begin, end] = simulated.intervals[rank][i];
      actions += fmt::format(
          "{}\n  {{\"action\": \"{}\", \"micro_batch\": {}, \"chunk\": {}, "
          "\"stage\": {}, \"begin\": {:.9g}, \"end\": {:.9g}}}",
          actions.empty() ? "" : ",", to_text(action), action.micro_batch, action.chunk,
          stages.stage_of({int(rank), action.chunk}), begin, end);
    }
    ranks += fmt::format("{} [{}]", ranks.empty() ? "" : ",", actions);
  }
  return fmt::format(
      "{{\"ranks\": {}, \"stages\": {}, \"micro_batches\": {}, \"makespan\": {:.9g}, "
      "\"bubble\": {:.9g}, \"inner_bubble\": {:.9g}, \"most_in_flight\": [{}], "
      "\"messages\": {}, \"in_turns\": {},\n\"actions\": [{}]}}\n",
      stages.ranks, stages.count(), schedule.micro_batches, simulated.makespan, simulated.bubble(),
      simulated.inner_bubble(), fmt::join(simulated.most_in_flight, ", "),
      std::ranges::count_if(messages(schedule), [](const auto& m) { return m.from != m.to; }),
      passes_in_turns, ranks);
}

}  // namespace usp
