#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/check.h"
#include "judge/judge.h"
#include "pipeline_parallel/simulate_schedule.h"

namespace usp::judging {

struct Answer {
  std::vector<Action> (*one_f_one_b_of_rank)(int64_t rank, int64_t p, int64_t m);
};

namespace {

using Actions = std::vector<Action>;

constexpr double kForward = 1, kBackward = 2;  // how long F and BW take

struct Step {
  int64_t p, m;

  std::string text() const { return fmt::format("p = {}, m = {}", p, m); }
  /// Forward passes of a rank up to its first backward, which it may hold at most, too.
  int64_t lead(int64_t rank) const { return std::min(p - rank, m); }
  double shortest() const { return double(m + p - 1) * (kForward + kBackward); }
};

Schedule run(const Answer& answer, const Step& step) {
  Schedule schedule{{Placement::loop, step.p, 1}, step.m, {}};
  run_alone([&] {
    for (int64_t rank = 0; rank < step.p; ++rank) {
      schedule.actions.push_back(answer.one_f_one_b_of_rank(rank, step.p, step.m));
    }
    return Values();
  });
  return schedule;
}

/// A rank's actions as the table has them; the first ones, if they are many.
std::string row(const Step& step, int64_t rank, const Actions& actions) {
  constexpr size_t kShown = 16;
  std::string text = fmt::format("{}: {}:", step.text(), rank);
  for (size_t i = 0; i < std::min(actions.size(), kShown); ++i) text += " " + to_text(actions[i]);
  return actions.size() > kShown ? text + " ..." : text;
}

[[noreturn]] void not_yet(const std::string& words, const Step& step, int64_t rank,
                          const Actions& actions) {
  throw NotYet({words, row(step, rank, actions)});
}

/// Every micro-batch forward and backward, once, and in this order.
void check_row(const Step& step, int64_t rank, const Actions& actions) {
  const auto refuse = [&](const std::string& words) { not_yet(words, step, rank, actions); };
  std::vector<int64_t> forward(step.m), backward(step.m);
  int64_t last_forward = -1, last_backward = -1;
  for (const Action& action : actions) {
    const auto& [work, i, chunk, with_next] = action;
    if (work == Work::B || work == Work::W) {
      refuse("B and W stand alone: 1F1B computes both gradients at once, in BW");
    }
    if (i < 0 || i >= step.m || chunk != 0) {
      refuse(fmt::format("rank {} runs {}, and the step has micro-batches 0 to {}{}", rank,
                         to_text(action), step.m - 1,
                         step.m < step.p ? ": where m < p, no rank can run p forward passes" : ""));
    }
    const bool is_forward = work == Work::F;
    if ((is_forward ? forward : backward)[i]++ > 0) {
      refuse(fmt::format("rank {} runs {} twice: a micro-batch passes a stage once", rank,
                         to_text(action)));
    }
    if (!is_forward && forward[i] == 0) {
      refuse(fmt::format("rank {} runs {} before F{}, which saves what backward reads", rank,
                         to_text(action), i));
    }
    int64_t& last = is_forward ? last_forward : last_backward;
    if (i < last && is_forward) {
      refuse(
          fmt::format("rank {} runs F{} after F{}: outputs come in the order in which the first "
                      "rank makes them",
                      rank, i, last));
    }
    if (i < last) {
      refuse(
          fmt::format("rank {} runs BW{} after BW{}: the last rank has the gradient of "
                      "micro-batch 0 first, so that one comes back first",
                      rank, i, last));
    }
    last = i;
  }
  const auto missing = [](const std::vector<int64_t>& times) {
    return std::ranges::find(times, 0) - times.begin();
  };
  if (missing(forward) < step.m) {
    refuse(fmt::format("rank {} never runs F{}", rank, missing(forward)));
  }
  if (missing(backward) < step.m) {
    refuse(
        fmt::format("rank {} never runs BW{}: after the last forward pass as many backward "
                    "passes are left as forward passes ran ahead",
                    rank, missing(backward)));
  }
}

/// Number of each rank's forward passes up to its first backward.
std::vector<int64_t> leads(const Schedule& schedule) {
  std::vector<int64_t> found;
  for (const Actions& actions : schedule.actions) {
    const auto is_backward = [](const Action& action) { return action.work != Work::F; };
    found.push_back(std::ranges::find_if(actions, is_backward) - actions.begin());
  }
  return found;
}

void check_leads(const Step& step, const Schedule& schedule) {
  const std::vector<int64_t> found = leads(schedule);
  std::vector<int64_t> wanted;
  for (int64_t rank = 0; rank < step.p; ++rank) wanted.push_back(step.lead(rank));
  if (found == wanted) return;
  const auto rank = std::ranges::mismatch(found, wanted).in1 - found.begin();
  const auto refuse = [&](const std::string& words) {
    not_yet(words, step, rank, schedule.actions[rank]);
  };
  const auto all = [&](int64_t lead) { return std::ranges::count(found, lead) == step.p; };
  if (all(step.m)) {
    refuse(
        fmt::format("this is AFAB: each rank holds all {} micro-batches, where rank {} can do "
                    "with {}",
                    step.m, rank, wanted[rank]));
  }
  if (all(1)) {
    refuse("this is the naive order: one micro-batch is in the pipeline, and p - 1 ranks wait");
  }
  if (std::ranges::equal(found, std::vector(wanted.rbegin(), wanted.rend()))) {
    refuse(
        "this is the wrong way round: the first rank waits longest for a gradient, the last one "
        "has its own at once");
  }
  if (all(found[0])) {
    refuse(
        fmt::format("every rank runs {} forward passes before its first backward: the nearer to "
                    "the last rank, the sooner a gradient is back",
                    found[0]));
  }
  const int64_t more = found[rank] - wanted[rank];
  const auto passes = [](int64_t count) {
    return fmt::format("{} forward pass{}", count, count == 1 ? "" : "es");
  };
  if (more > 0) {
    refuse(
        fmt::format("rank {} runs {} before its first backward, where {} suffice{}: it holds {} "
                    "too many",
                    rank, passes(found[rank]), wanted[rank], wanted[rank] == 1 ? "s" : "",
                    more == 1 ? "a micro-batch" : fmt::format("{} micro-batches", more)));
  }
  refuse(
      fmt::format("rank {} runs {} before its first backward, and {} fit in until a gradient can "
                  "be back: it waits, and the bubble grows",
                  rank, passes(found[rank]), wanted[rank]));
}

/// What the whole table comes to: who holds how much, how long a step takes.
void check_table(const Step& step, const Schedule& schedule) {
  try {
    check_schedule(schedule, step.text());
  } catch (const UsageError& refused) {
    throw NotYet({"the ranks wait for each other", refused.what()});
  }
  const SimulatedSchedule found = simulate_schedule(
      schedule, {.forward = kForward, .input_gradient = 1, .weight_gradient = kBackward - 1});
  for (int64_t rank = 0; rank < step.p; ++rank) {
    if (found.most_in_flight[rank] <= step.lead(rank)) continue;
    not_yet(fmt::format("rank {} comes to hold {} micro-batches, where {} suffice: once it has run "
                        "a backward pass, one forward pass has room again",
                        rank, found.most_in_flight[rank], step.lead(rank)),
            step, rank, schedule.actions[rank]);
  }
  if (found.makespan > step.shortest()) {
    throw NotYet(
        {"the bubble is larger than (p - 1)/m: after its first backward a rank runs "
         "forward and backward in turns, as long as forward passes are left",
         fmt::format("{}: a step takes {:g}, where {:g} suffice; bubble {:.4g} and not "
                     "{:.4g}",
                     step.text(), found.makespan, step.shortest(), found.bubble(),
                     double(step.p - 1) / double(step.m))});
  }
}

Actions in_turns(const Step& step, int64_t rank) {
  Actions actions;
  int64_t next = 0;
  while (next < step.lead(rank)) actions.push_back({Work::F, next++});
  for (int64_t i = 0; i < step.m; ++i) {
    actions.push_back({Work::BW, i});
    if (next < step.m) actions.push_back({Work::F, next++});
  }
  return actions;
}

void judge_one(const Answer& answer, const Step& step) {
  const Schedule schedule = run(answer, step);
  for (int64_t rank = 0; rank < step.p; ++rank) check_row(step, rank, schedule.actions[rank]);
  check_leads(step, schedule);
  check_table(step, schedule);
  for (int64_t rank = 0; rank < step.p; ++rank) {
    if (schedule.actions[rank] == in_turns(step, rank)) continue;
    not_yet(
        "the step is short enough and nobody holds too much, but forward and backward are not "
        "in turns",
        step, rank, schedule.actions[rank]);
  }
}

}  // namespace

void judge(const Answer& answer) {
  for (const auto& [p, m] : {std::pair{4, 8}, {3, 7}, {2, 2}, {4, 2}, {5, 1}, {1, 3}, {8, 9}}) {
    judge_one(answer, {p, m});
  }
}

Values observe(const Answer& answer, uint64_t seed) {
  const int64_t value = static_cast<int64_t>(seed);
  Values all;
  for (const Actions& actions : run(answer, {1 + value % 7, 1 + value * 5 % 13}).actions) {
    for (const auto& [work, micro_batch, chunk, with_next] : actions) {
      all.push_back(double(work));
      all.push_back(double(micro_batch));
      all.push_back(double(chunk));
    }
    all.push_back(-1);
  }
  return all;
}

}  // namespace usp::judging
