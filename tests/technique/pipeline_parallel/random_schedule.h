#pragma once

#include <map>
#include <tuple>

#include "pipeline_parallel/simulate_schedule.h"
#if __has_include("proof/drawn_pipeline.h")
#include "proof/drawn_pipeline.h"
#endif
#include "testing.h"

/// Schedules made at random, and what a schedule has to be, written down once more.
namespace usp::test {

/// Which stage chunk `chunk` of a rank is.
inline int64_t stage_at(const Stages& stages, int64_t rank, int64_t chunk) {
  if (stages.placement == Placement::loop) return chunk * stages.ranks + rank;
  if (chunk == 0) return rank;
  return (stages.placement == Placement::fold ? 2 : 1) * stages.ranks - 1 - rank;
}

/// Whether micro-batch i of m passes the chunk.
inline bool passes(const Stages& stages, int64_t chunk, int64_t i, int64_t m) {
  return stages.placement != Placement::mirror || (chunk == 0) == (i < m / 2);
}

/// Where an action stands in a schedule: its rank, and its number there.
using At = std::pair<int64_t, int64_t>;

/// Every action with the one of another stage that it waits for, if there is one.
inline std::map<At, At> needs(const Schedule& schedule) {
  std::map<std::tuple<int64_t, int64_t, bool>, At> made;  // by stage, micro-batch, backward
  const auto each = [&](const auto& body) {
    for (int64_t rank = 0; rank < schedule.stages.ranks; ++rank) {
      for (int64_t i = 0; i < std::ssize(schedule.actions[rank]); ++i) {
        const Action& action = schedule.actions[rank][i];
        if (action.work == Work::W) continue;
        body(At{rank, i}, stage_at(schedule.stages, rank, action.chunk), action);
      }
    }
  };
  each([&](At at, int64_t stage, const Action& action) {
    made[{stage, action.micro_batch, action.work != Work::F}] = at;
  });
  std::map<At, At> found;
  each([&](At at, int64_t stage, const Action& action) {
    const bool backward = action.work != Work::F;
    const auto from = made.find({stage + (backward ? 1 : -1), action.micro_batch, backward});
    if (from != made.end()) found[at] = from->second;
  });
  return found;
}

/// Whether on every rank F comes before B and B before W.
inline bool in_order(const Schedule& schedule) {
  for (const auto& actions : schedule.actions) {
    std::map<std::pair<int64_t, int64_t>, int> done;  // 1: forward, 2: the input's gradient
    for (const auto& [work, micro_batch, chunk, with_next] : actions) {
      int& stage = done[{micro_batch, chunk}];
      const int before = work == Work::F ? 0 : work == Work::W ? 2 : 1;
      if (stage != before) return false;
      stage = work == Work::F ? 1 : work == Work::B ? 2 : 3;
    }
  }
  return true;
}

/// Whether the ranks can get to the end of a schedule in which nothing is missing.
inline bool is_valid(const Schedule& schedule) {
  if (!in_order(schedule)) return false;
  const std::map<At, At> waits_for = needs(schedule);
  std::vector<int64_t> next(schedule.actions.size());
  int64_t left = 0;
  for (const auto& actions : schedule.actions) left += std::ssize(actions);
  for (bool moved = true; moved;) {
    moved = false;
    for (int64_t rank = 0; rank < std::ssize(next); ++rank) {
      if (next[rank] == std::ssize(schedule.actions[rank])) continue;
      const auto need = waits_for.find({rank, next[rank]});
      if (need != waits_for.end() && next[need->second.first] <= need->second.second) continue;
      ++next[rank];
      --left;
      moved = true;
    }
  }
  return left == 0;
}

#if __has_include("proof/drawn_pipeline.h")
/// Any placement that so many ranks and about so many micro-batches can have, and actions in an
/// order that ends, one after the other.
inline Schedule random_schedule(Random& random, int64_t ranks, int64_t micro_batches,
                                int64_t most_chunks = 3) {
  const int64_t kinds = most_chunks < 2 ? 0 : ranks % 2 == 0 ? 2 : 1;
  const auto placement = Placement(random.integer(0, kinds));
  const bool loop = placement == Placement::loop, mirror = placement == Placement::mirror;
  const Stages stages{placement, ranks, loop ? random.integer(1, most_chunks) : 2};
  Draws draws(uint64_t(random.integer(0, 1 << 30)), "schedule");
  const int64_t odd = mirror ? micro_batches % 2 : 0;
  Schedule schedule = draw_schedule(stages, micro_batches + odd, draws);
  for (std::vector<Action>& actions : schedule.actions) {
    for (Action& action : actions) action.with_next = false;
  }
  return schedule;
}
#endif

/// Fails the test unless every action begins as soon as its rank is free and what it needs is
/// there.
inline void check_times(const Schedule& schedule, const SimulatedSchedule& simulated,
                        const WorkTimes& times) {
  const std::map<At, At> waits_for = needs(schedule);
  double end_of_all = 0;
  for (int64_t rank = 0; rank < schedule.stages.ranks; ++rank) {
    double free = 0, busy = 0;
    for (int64_t i = 0; i < std::ssize(schedule.actions[rank]); ++i) {
      const auto [begin, end] = simulated.intervals[rank][i];
      double expected = free;
      if (const auto need = waits_for.find({rank, i}); need != waits_for.end()) {
        const auto [other, index] = need->second;
        const double travels = other == rank ? 0 : times.message;
        expected = std::max(expected, simulated.intervals[other][index].end + travels);
      }
      const Work work = schedule.actions[rank][i].work;
      const double takes = (work == Work::F ? times.forward : 0) +
                           (work == Work::B || work == Work::BW ? times.input_gradient : 0) +
                           (work == Work::W || work == Work::BW ? times.weight_gradient : 0);
      REQUIRE(begin == expected);
      REQUIRE(end == begin + takes);
      free = end;
      busy += takes;
    }
    REQUIRE(std::abs(simulated.busy[rank] - busy) <= 1e-9);
    end_of_all = std::max(end_of_all, free);
  }
  REQUIRE(simulated.makespan == end_of_all);
}

}  // namespace usp::test
