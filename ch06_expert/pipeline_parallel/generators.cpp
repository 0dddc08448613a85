#include "pipeline_parallel/generators.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>

#include "base/check.h"
#include "base/rules.h"

namespace usp {

namespace {

using Actions = std::vector<Action>;

Schedule empty_schedule(const ScheduleRequest& request, Placement placement = Placement::loop) {
  const int64_t chunks = placement == Placement::loop ? request.chunks : 2;
  return {{placement, request.ranks, chunks},
          request.micro_batches,
          std::vector<Actions>(size_t(request.ranks))};
}

/// One micro-batch is in the pipeline at a time.
Schedule naive(const ScheduleRequest& request) {
  Schedule schedule = empty_schedule(request);
  for (Actions& actions : schedule.actions) {
    for (int64_t i = 0; i < request.micro_batches; ++i) {
      for (int64_t c = 0; c < request.chunks; ++c) actions.push_back({Work::F, i, c});
      for (int64_t c = request.chunks; c-- > 0;) actions.push_back({Work::BW, i, c});
    }
  }
  return schedule;
}

/// All forward, all backward; with several chunks one chunk after the other.
Schedule afab(const ScheduleRequest& request) {
  Schedule schedule = empty_schedule(request);
  const int64_t m = request.micro_batches;
  for (Actions& actions : schedule.actions) {
    for (int64_t c = 0; c < request.chunks; ++c) {
      for (int64_t i = 0; i < m; ++i) actions.push_back({Work::F, i, c});
    }
    for (int64_t c = request.chunks; c-- > 0;) {
      for (int64_t i = 0; i < m; ++i) actions.push_back({Work::BW, i, c});
    }
  }
  return schedule;
}

// [one_f_one_b]
/// One forward, one backward: a rank begins backward as soon as the first gradient can have come
/// back to it, and from then on holds as many micro-batches as before.
Schedule one_f_one_b(const ScheduleRequest& request) {
  Schedule schedule = empty_schedule(request);
  const int64_t p = request.ranks, m = request.micro_batches;
  for (int64_t rank = 0; rank < p; ++rank) {
    Actions& actions = schedule.actions[rank];
    const int64_t warm_up = std::min(p - 1 - rank, m);
    for (int64_t i = 0; i < warm_up; ++i) actions.push_back({Work::F, i});
    for (int64_t i = warm_up; i < m; ++i) {
      actions.push_back({Work::F, i});
      actions.push_back({Work::BW, i - warm_up});
    }
    for (int64_t i = m - warm_up; i < m; ++i) actions.push_back({Work::BW, i});
  }
  return schedule;
}
// [one_f_one_b]

/// One forward, one backward on several chunks: a rank runs `run` micro-batches through a chunk,
/// then the same ones through its next. `further`: forward passes ahead of those that fill the
/// pipeline.
Schedule in_runs(const ScheduleRequest& request, int64_t run, int64_t further) {
  Schedule schedule = empty_schedule(request);
  const int64_t p = request.ranks, m = request.micro_batches, v = request.chunks;
  Actions forward, backward;
  for (int64_t first = 0; first < m; first += run) {
    const int64_t end = std::min(first + run, m);
    for (int64_t c = 0; c < v; ++c) {
      for (int64_t i = first; i < end; ++i) forward.push_back({Work::F, i, c});
      for (int64_t i = first; i < end; ++i) backward.push_back({Work::BW, i, v - 1 - c});
    }
  }
  for (int64_t rank = 0; rank < p; ++rank) {
    // The last chunk's first forward comes after those of the chunks before it.
    const int64_t ahead = (v == 1 ? 1 : 2) * (p - 1 - rank) + (v - 1) * std::min(run, m);
    const int64_t warm_up = std::min(ahead + further, v * m);
    Actions& actions = schedule.actions[rank];
    actions.assign(forward.begin(), forward.begin() + warm_up);
    for (int64_t i = warm_up; i < v * m; ++i) {
      actions.push_back(forward[i]);
      actions.push_back(backward[i - warm_up]);
    }
    actions.insert(actions.end(), backward.end() - warm_up, backward.end());
  }
  return schedule;
}

/// With run = p that is Megatron's order, depth first. Runs that are shorter than p, as the last
/// one may be, need more forward passes ahead: else the last rank waits for a gradient of the
/// first, which waits for an output of the last.
Schedule in_runs(const ScheduleRequest& request, int64_t run) {
  Schedule schedule = in_runs(request, run, 0);
  for (int64_t further = 1; deadlocks(schedule); ++further) {
    schedule = in_runs(request, run, further);
  }
  return schedule;
}

// [zero_bubble]
/// As 1F1B, but the gradients of weights wait: on rank r up to `patience` r of them, until nothing
/// more urgent can be done. With more forward passes ahead (H2: twice as many) the first gradient
/// finds the ranks at work, too.
Schedule zero_bubble(const ScheduleRequest& request, int64_t patience) {
  Schedule schedule = empty_schedule(request);
  const int64_t p = request.ranks, m = request.micro_batches;
  for (int64_t rank = 0; rank < p; ++rank) {
    Actions& actions = schedule.actions[rank];
    const int64_t warm_up = std::min(patience * (p - 1 - rank), m);
    int64_t weights = 0;
    for (int64_t i = 0; i < m + warm_up; ++i) {
      if (i < m) actions.push_back({Work::F, i});
      if (i < warm_up) continue;
      actions.push_back({Work::B, i - warm_up});
      if (i - warm_up - weights >= patience * rank) actions.push_back({Work::W, weights++});
    }
    while (weights < m) actions.push_back({Work::W, weights++});
  }
  return schedule;
}
// [zero_bubble]

/// Micro-batches enter at both ends: here each rank has a near chunk, close to where its
/// micro-batches come in, and a far one, close to where they turn. `depth`: ranks between the end
/// and the middle.
Schedule dualpipe(const ScheduleRequest& request, Placement placement) {
  Schedule schedule = empty_schedule(request, placement);
  const int64_t p = request.ranks, m = request.micro_batches;
  const bool mirrored = placement == Placement::mirror;
  const int64_t depth = mirrored ? p / 2 : p, of_each = mirrored ? m / 2 : m;
  for (int64_t rank = 0; rank < p; ++rank) {
    const bool second = mirrored && rank >= depth;  // its near chunk is the mirrored one
    const int64_t place = second ? p - 1 - rank : rank, inside = depth - 1 - place;
    Actions& actions = schedule.actions[rank];
    int64_t next_f[2] = {0, 0}, next_b[2] = {0, 0};
    std::deque<Action> weights;
    const auto chunk_of = [&](int far) { return int64_t(second ? 1 - far : far); };
    const auto first_of = [&](int far) { return mirrored && chunk_of(far) == 1 ? of_each : 0; };
    const auto F = [&](int far) {
      actions.push_back({Work::F, first_of(far) + next_f[far]++, chunk_of(far)});
    };
    const auto B = [&](int far, bool split = false) {
      const int64_t i = first_of(far) + next_b[far]++;
      actions.push_back({split ? Work::B : Work::BW, i, chunk_of(far)});
      if (split) weights.push_back({Work::W, i, chunk_of(far)});
    };
    const auto W = [&] {
      actions.push_back(weights.front());
      weights.pop_front();
    };
    const auto times = [](int64_t count, const std::function<void(int64_t)>& body) {
      for (int64_t i = 0; i < count; ++i) body(i);
    };
    constexpr int near = 0, far = 1;
    times(2 * inside, [&](int64_t) { F(near); });
    times(place + 1, [&](int64_t) { F(near), F(far); });
    times(inside, [&](int64_t) { B(far, true), W(), F(far); });
    times(of_each - 2 * depth + place + 1, [&](int64_t) { F(near), B(far), F(far), B(near); });
    times(inside, [&](int64_t) { B(far), F(far), B(near); });
    times(place + 1, [&](int64_t i) {  // from the middle on, weights wait
      const int64_t half = (place + 1) / 2;
      B(far, i > half || (i == half && place % 2 == 1));
      B(near, i >= half);
    });
    times(inside, [&](int64_t) { W(), B(near, true); });
    while (!weights.empty()) W();
  }
  return schedule;
}

/// A list scheduler: of all ranks, the one that can begin something first does so; a gradient of an
/// input before a forward pass, that before the gradients of weights. A rank has at most `limit`
/// micro-batches in flight.
Schedule list_schedule(const ScheduleRequest& request, Placement placement, int64_t limit) {
  Schedule schedule = empty_schedule(request, placement);
  const Stages& stages = schedule.stages;
  const int64_t p = request.ranks, m = request.micro_batches, v = stages.chunks, S = stages.count();
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<double> free(p), made_f(S * m, kNever), made_b(S * m, kNever);
  std::vector<int64_t> next_f(S), next_b(S), next_w(S);  // by stage, each of which is on one rank
  struct Choice {
    double begin;
    int64_t priority, rank, stage;
    Work work;
    auto operator<=>(const Choice&) const = default;
  };
  for (int64_t left = 3 * S * m; left > 0; --left) {
    Choice best{kNever, 0, 0, 0, Work::F};
    for (int64_t s = 0; s < S; ++s) {
      const Place at = stages.place_of(s, 0, m);
      const int64_t f = next_f[s], b = next_b[s], home = stages.stage_of({at.rank, 0});
      const auto offer = [&](double from, int64_t priority, Work work) {
        best = std::min(best, {std::max(from, free[at.rank]), priority, at.rank, s, work});
      };
      const auto arrival = [&](double made, int64_t from) {
        return made + (stages.place_of(from, 0, m).rank == at.rank ? 0 : request.times.message);
      };
      if (b < f)
        offer(s == S - 1 ? made_f[s * m + b] : arrival(made_b[(s + 1) * m + b], s + 1), 0, Work::B);
      // A micro-batch that enters a rank's first chunk needs room in its last one, too.
      const int64_t last = stages.stage_of({at.rank, v - 1});
      const bool fits = s != home || f - std::min(next_w[home], next_w[last]) < limit;
      if (f < m && fits)
        offer(s == 0 ? 0 : arrival(made_f[(s - 1) * m + f], s - 1), v - at.chunk, Work::F);
      if (next_w[s] < b) offer(0, m + v + next_w[s], Work::W);  // the oldest first
    }
    const auto& [begin, priority, rank, s, work] = best;
    USP_CHECK(begin < kNever, "no rank can go on");
    const int64_t i = work == Work::F ? next_f[s]++ : work == Work::B ? next_b[s]++ : next_w[s]++;
    free[rank] = begin + request.times.of(work);
    if (work == Work::F) made_f[s * m + i] = free[rank];
    if (work == Work::B) made_b[s * m + i] = free[rank];
    schedule.actions[rank].push_back({work, i, stages.place_of(s, 0, m).chunk});
  }
  return schedule;
}

/// Refuses what a schedule cannot take.
void check_request(const std::string& name, const ScheduleRequest& request) {
  const int64_t p = request.ranks, m = request.micro_batches;
  const bool many_chunks = name == "interleaved" || name == "breadth_first" || name == "llama3" ||
                           name == "naive" || name == "afab" || name == "auto";
  if (request.chunks > 1 && !many_chunks) {
    refuse("chunks_of_schedule", {"leave out --pp_chunks"},
           "pp_schedule={} is for a fixed number of chunks on each rank, not for pp_chunks={}",
           name, request.chunks);
  }
  if (name == "dualpipe" && (p % 2 != 0 || m % 2 != 0 || m < 2 * p - 2)) {
    const int64_t even = p + p % 2, enough = std::max(m + m % 2, 2 * even - 2);
    refuse("even_dualpipe", {fmt::format("--pp_size {} --grad_acc_steps {}", even, enough)},
           "pp_schedule=dualpipe needs an even pp_size and an even number of micro-batches, at "
           "least 2 pp_size - 2, not pp_size={} and grad_acc_steps={}",
           p, m);
  }
  if (name == "dualpipe_v" && m < 2 * p - 1) {
    refuse_hang(
        "full_dualpipe_v", values_of("grad_acc_steps", {2 * p - 1}),
        "pp_schedule=dualpipe_v needs at least 2 pp_size - 1 micro-batches, not grad_acc_steps={} "
        "with pp_size={}",
        m, p);
  }
}

const std::map<std::string, std::function<Schedule(const ScheduleRequest&)>>& generators() {
  static const std::map<std::string, std::function<Schedule(const ScheduleRequest&)>> known = {
      {"naive", naive},
      {"afab", afab},
      {"breadth_first", afab},
      {"1f1b", one_f_one_b},
      {"interleaved", [](const ScheduleRequest& r) { return in_runs(r, r.ranks); }},
      {"llama3",
       [](const ScheduleRequest& r) {
         return in_runs(r, r.run_length > 0 ? r.run_length : r.ranks);
       }},
      {"zb_h1", [](const ScheduleRequest& r) { return zero_bubble(r, 1); }},
      {"zb_h2", [](const ScheduleRequest& r) { return zero_bubble(r, 2); }},
      {"zb_v", [](const ScheduleRequest& r) { return list_schedule(r, Placement::fold, r.ranks); }},
      {"dualpipe", [](const ScheduleRequest& r) { return dualpipe(r, Placement::mirror); }},
      {"dualpipe_v", [](const ScheduleRequest& r) { return dualpipe(r, Placement::fold); }},
      {"auto",
       [](const ScheduleRequest& r) {
         return list_schedule(r, Placement::loop,
                              r.most_in_flight > 0 ? r.most_in_flight : r.ranks);
       }},
  };
  return known;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> known;
    for (const auto& [name, generate] : generators()) known.push_back(name);
    return known;
  }();
  return names;
}

Schedule make_schedule(const std::string& name, const ScheduleRequest& request) {
  check_request(name, request);
  const auto found = generators().find(name);
  if (found == generators().end()) {
    usage_error("pp_schedule={} is no schedule; try {}", name, fmt::join(schedule_names(), ", "));
  }
  return found->second(request);
}

}  // namespace usp
