#include "pipeline_parallel/schedule.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "pipeline_parallel/generators.h"
#include "technique/pipeline_parallel/random_schedule.h"

namespace usp::test {
namespace {

ScheduleRequest request(int64_t p, int64_t m, int64_t v = 1) {
  return {.ranks = p, .micro_batches = m, .chunks = v};
}

/// Whether a generator takes the request, as its page says.
bool takes(const std::string& name, const ScheduleRequest& r) {
  const std::set<std::string> of_any_chunks = {"naive",       "afab",   "breadth_first",
                                               "interleaved", "llama3", "auto"};
  if (r.chunks > 1 && !of_any_chunks.contains(name)) return false;
  if (name == "dualpipe" && (r.ranks % 2 != 0 || r.micro_batches % 2 != 0)) return false;
  return !name.starts_with("dualpipe") ||
         r.micro_batches >= 2 * r.ranks - (name == "dualpipe" ? 2 : 1);
}

/// Every name with every request that it takes.
void each_schedule(const std::function<void(const std::string&, const ScheduleRequest&)>& body) {
  for (const std::string& name : schedule_names()) {
    for (int64_t p : {1, 2, 3, 4, 8}) {
      for (int64_t m :
           std::set<int64_t>{1, 2, 3, p - 1, p, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 20}) {
        for (int64_t v : {1, 2, 3}) {
          if (m == 0 || !takes(name, request(p, m, v))) continue;
          CAPTURE(name, p, m, v);
          body(name, request(p, m, v));
        }
      }
    }
  }
}

double bubble(const std::string& name, const ScheduleRequest& r, const WorkTimes& times = {}) {
  return simulate_schedule(make_schedule(name, r), times).bubble();
}

/// What the rank idles from its own first action to its own last.
double idles(const SimulatedSchedule& simulated, int rank) {
  const auto& intervals = simulated.intervals[rank];
  return intervals.back().end - intervals.front().begin - simulated.busy[rank];
}

/// Multiples of a quarter, whose sums are exact; first that of the book's figures.
std::vector<WorkTimes> some_times(int64_t count) {
  Random random(6);
  std::vector<WorkTimes> times = {{1, 1, 1}};
  const auto any = [&] { return 0.25 * double(random.integer(1, 8)); };
  while (std::ssize(times) < count) times.push_back({any(), any(), any()});
  return times;
}

TEST_CASE("every schedule does everything once, in an order that ends, and is its own text") {
  int64_t count = 0;
  each_schedule([&](const std::string& name, const ScheduleRequest& r) {
    const Schedule schedule = make_schedule(name, r);
    check_schedule(schedule, name);
    REQUIRE(!deadlocks(schedule));
    REQUIRE(is_valid(schedule));
    REQUIRE(schedule.micro_batches == r.micro_batches);
    const Schedule again = parse_schedule(to_text(schedule), name);
    REQUIRE(again.actions == schedule.actions);
    REQUIRE(again.micro_batches == schedule.micro_batches);
    REQUIRE(again.stages.placement == schedule.stages.placement);
    REQUIRE(again.stages.ranks == schedule.stages.ranks);
    REQUIRE(again.stages.chunks == schedule.stages.chunks);
    ++count;
  });
  REQUIRE(count > 500);
}

TEST_CASE("runs of any length have an order that ends", "[not_sanitized]") {
  for (int64_t p : {2, 3, 4, 8}) {
    for (int64_t m : {int64_t(1), p - 1, p, 2 * p + 1, int64_t(20)}) {
      for (int64_t v : {1, 2, 3}) {
        for (int64_t run = 1; run <= m; ++run) {
          CAPTURE(p, m, v, run);
          ScheduleRequest r = request(p, m, v);
          r.run_length = run;
          const Schedule schedule = make_schedule("llama3", r);
          check_schedule(schedule, "llama3");
          if (run < p || m % run != 0 || v == 1) continue;
          // As many micro-batches in a row hold as many more activations.
          const SimulatedSchedule simulated = simulate_schedule(schedule, {});
          for (int64_t rank = 0; rank < p; ++rank) {
            REQUIRE(simulated.most_in_flight[rank] ==
                    std::min(v * m, (v - 1) * run + 2 * (p - 1 - rank) + 1));
          }
        }
      }
    }
  }
}

TEST_CASE("stages are where the placements put them, and a micro-batch meets each once") {
  const auto check = [](const Stages& stages, int64_t m) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t s = 0; s < stages.count(); ++s) {
        const Place place = stages.place_of(s, i, m);
        CAPTURE(int(stages.placement), stages.ranks, stages.chunks, i, s);
        REQUIRE(stages.stage_of(place) == s);
        REQUIRE(stage_at(stages, place.rank, place.chunk) == s);
        REQUIRE(passes(stages, place.chunk, i, m));
      }
    }
  };
  for (int64_t p : {1, 2, 3, 4, 8}) {
    for (int64_t v : {1, 2, 3}) check({Placement::loop, p, v}, 3);
    check({Placement::fold, p, 2}, 3);
    if (p % 2 == 0) check({Placement::mirror, p, 2}, 6);
  }
}

TEST_CASE("the simulated bubble is the formula's: p-1, (p-1)/m, and (p-1)/(v m) where p divides m",
          "[not_sanitized]") {
  each_schedule([](const std::string& name, const ScheduleRequest& r) {
    const double p = double(r.ranks), m = double(r.micro_batches), v = double(r.chunks);
    for (const WorkTimes& times : some_times(5)) {
      const double found = bubble(name, r, times);
      if (name == "naive") CHECK(found == Approx(p - 1));
      if (v == 1 && (name == "afab" || name == "1f1b" || name == "interleaved")) {
        CHECK(found == Approx((p - 1) / m));
      }
      // Fewer micro-batches than ranks leave a gap in front of each chunk but the first.
      const double gap = (v - 1) * std::max(0.0, p - m);
      const double looping = (p - 1 + gap) / (v * m);
      if (name == "afab" || name == "breadth_first") CHECK(found == Approx(looping));
      const bool in_runs = name == "interleaved" || name == "llama3";
      if (in_runs && (m <= p || r.micro_batches % r.ranks == 0)) CHECK(found == Approx(looping));
      if (in_runs) CHECK(found >= looping - 1e-12);
    }
  });
  // A last run that is shorter than p leaves gaps; one run of all leaves none.
  ScheduleRequest uneven = request(8, 12, 2);
  CHECK(bubble("interleaved", uneven) == Approx(35.0 / 72));
  uneven.run_length = 12;
  CHECK(bubble("llama3", uneven) == Approx(7.0 / 24));
}

TEST_CASE("a message costs a rank that waits for it twice its time") {
  WorkTimes times{1, 1.5, 0.5, 0.25};
  const double work = 3;
  for (int64_t p : {1, 2, 4, 8}) {
    for (int64_t m : {int64_t(1), p, 2 * p + 1}) {
      CAPTURE(p, m);
      const double wait = double(p - 1) * (1 + 2 * times.message / work);
      CHECK(bubble("naive", request(p, m), times) == Approx(wait));
      CHECK(bubble("afab", request(p, m), times) == Approx(wait / double(m)));
      // One forward, one backward: each of them waits, where all forward waits once.
      CHECK(bubble("1f1b", request(p, m), times) >= wait / double(m) - 1e-12);
    }
  }
}

TEST_CASE("of the book's 24 bubbles of 8 ranks, 15 are reached and 9 lie below any schedule's") {
  const double printed[][4] = {{7.00, 3.50, 1.75, 0.875},    {3.50, 1.75, 0.875, 0.438},
                               {1.75, 0.875, 0.438, 0.219},  {0.875, 0.438, 0.219, 0.109},
                               {0.438, 0.219, 0.109, 0.055}, {0.219, 0.109, 0.055, 0.027}};
  constexpr int64_t p = 8;
  int reached = 0, out_of_reach = 0;
  for (int row = 0; row < 6; ++row) {
    for (int column = 0; column < 4; ++column) {
      const int64_t m = 1 << row, v = 1 << column;
      CAPTURE(m, v);
      const double formula = double(p - 1) / double(v * m);
      CHECK(std::abs(formula - printed[row][column]) <= 0.000501);
      // A micro-batch passes all stages, forward and backward, one after the other.
      const double bound = double(p) / double(m) - 1;
      for (const char* name : {"interleaved", "breadth_first"}) {
        const double found = bubble(name, request(p, m, v));
        CHECK(found >= bound);
        if (m >= p || v == 1) CHECK(found == Approx(formula));
      }
      ++(bound > formula ? out_of_reach : reached);
      CHECK((bound > formula) == (m < p && v > 1));
    }
  }
  CHECK(reached == 15);
  CHECK(out_of_reach == 9);
}

TEST_CASE("zero bubble: H1 idles (p-1)(F+B-W), H2 (p-1)F, none of it between its ends") {
  for (int64_t p : {1, 2, 3, 4, 8}) {
    for (int64_t m : {2 * p - 1, 2 * p, 4 * p + 1}) {
      for (const WorkTimes& times : some_times(60)) {
        const auto [F, B, W, message] = times;
        CAPTURE(p, m, F, B, W);
        const double work = double(m) * (F + B + W), others = double(p - 1);
        const SimulatedSchedule h1 =
            simulate_schedule(make_schedule("zb_h1", request(p, m)), times);
        const SimulatedSchedule h2 =
            simulate_schedule(make_schedule("zb_h2", request(p, m)), times);
        // The second and third terms: where the gradients of weights are too short to fill a gap.
        const double first = others * std::max({F, B, F + B - W});
        const double second = others * std::max({F, B - F, F + B - 2 * W});
        const double inside = others * std::max({0.0, B - F, F + B - 2 * W});
        CHECK(h1.bubble() * work == Approx(first).margin(1e-9));
        CHECK(h2.bubble() * work == Approx(second).margin(1e-9));
        CHECK(idles(h2, 0) == Approx(inside).margin(1e-9));
        if (inside == 0 && F <= W) CHECK(h2.inner_bubble() == Approx(0).margin(1e-12));
      }
    }
  }
}

TEST_CASE("pipelines from both ends idle (p/2-1) max(F, F+B-W), folded ones (p-1) max(F, F+B-W)") {
  for (int64_t p : {2, 4, 6, 8}) {
    for (int64_t m : {2 * p, 2 * p + 2, 5 * p}) {
      for (const WorkTimes& times : some_times(60)) {
        const auto [F, B, W, message] = times;
        if (B > F || F > B + W) continue;  // then a rank waits for a neighbor in other places, too
        CAPTURE(p, m, F, B, W);
        const double gap = F + std::max(0.0, B - W), work = double(m) * (F + B + W);
        CHECK(bubble("dualpipe", request(p, m), times) * work ==
              Approx(double(p / 2 - 1) * gap).margin(1e-9));
        CHECK(bubble("dualpipe_v", request(p, m), times) * 2 * work ==
              Approx(double(p - 1) * gap).margin(1e-9));
      }
    }
  }
}

TEST_CASE("gradients of weights that wait shrink the bubble below that of 1F1B") {
  for (int64_t p : {2, 3, 4, 8}) {
    for (int64_t m : {int64_t(1), p - 1, p, 2 * p + 1, int64_t(20)}) {
      CAPTURE(p, m);
      const double one = bubble("1f1b", request(p, m));
      for (const char* name : {"zb_h1", "zb_h2", "auto"}) {
        CAPTURE(name);
        CHECK(bubble(name, request(p, m)) < one);
      }
    }
  }
}

TEST_CASE("a rank holds the activations of as many micro-batches as its schedule says") {
  each_schedule([](const std::string& name, const ScheduleRequest& r) {
    const int64_t p = r.ranks, m = r.micro_batches, v = r.chunks;
    const SimulatedSchedule simulated = simulate_schedule(make_schedule(name, r), {});
    for (int64_t rank = 0; rank < p; ++rank) {
      CAPTURE(rank);
      const int64_t found = simulated.most_in_flight[rank];
      if (name == "naive") CHECK(found == v);
      if (name == "afab" || name == "breadth_first") CHECK(found == v * m);
      if (name == "1f1b") CHECK(found == std::min(p - rank, m));
      if (name == "interleaved" && v > 1 && m % p == 0) {
        CHECK(found == std::min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1));
      }
      // Gradients of weights that wait hold what the ranks in front hold micro-batches for.
      if (name == "zb_h1" || (name == "auto" && v == 1)) CHECK(found == std::min(p, m));
      if (name == "auto") CHECK(found <= v * std::min(p, m));
      if (name == "zb_h2") CHECK(found == std::min(2 * p - 1, m));
      if (name == "zb_v") CHECK(found == 2 * std::min(p, m));  // of half a rank's layers
      // Of two copies, or of halves; one less at the ends where there are no more than needed.
      const int64_t full = name == "dualpipe" ? p + 1 : 2 * p + 1;
      if (name.starts_with("dualpipe") && m >= 2 * p) CHECK(found == full);
      if (name.starts_with("dualpipe") && m < 2 * p) CHECK((found == full || found == full - 1));
    }
  });
}

TEST_CASE("the list scheduler keeps to its memory") {
  for (int64_t p : {2, 4, 8}) {
    for (int64_t limit = 1; limit <= 2 * p; ++limit) {
      ScheduleRequest r = request(p, 3 * p);
      r.most_in_flight = limit;
      r.times = {1, 1.25, 0.75, 0.125};
      const Schedule schedule = make_schedule("auto", r);
      check_schedule(schedule, "auto");
      const std::vector<int64_t> held = simulate_schedule(schedule, r.times).most_in_flight;
      CAPTURE(p, limit, fmt::format("{}", fmt::join(held, " ")));
      CHECK(*std::ranges::max_element(held) <= limit);
    }
  }
}

TEST_CASE("v chunks multiply the messages: 2 (p v - 1) m between ranks") {
  each_schedule([](const std::string& name, const ScheduleRequest& r) {
    const Schedule schedule = make_schedule(name, r);
    const std::vector<StageMessage> all = messages(schedule);
    const int64_t between =
        std::ranges::count_if(all, [](const auto& x) { return x.from != x.to; });
    const int64_t p = r.ranks, m = r.micro_batches, v = r.chunks;
    const Placement placement = schedule.stages.placement;
    if (p == 1) CHECK(between == 0);
    if (p > 1 && placement == Placement::loop) CHECK(between == 2 * (p * v - 1) * m);
    if (placement == Placement::fold) {  // the last rank hands over to itself
      CHECK(between == 2 * (2 * p - 2) * m);
      CHECK(std::ssize(all) == between + 2 * m);
    }
    if (p > 1 && placement == Placement::mirror) CHECK(between == 2 * (p - 1) * m);
    for (const StageMessage& message : all) {
      const Action& sent = schedule.actions[message.from][message.sent_by];
      const Action& used = schedule.actions[message.to][message.used_by];
      REQUIRE(sent.micro_batch == message.micro_batch);
      REQUIRE(used.micro_batch == message.micro_batch);
      const bool forward = sent.work == Work::F;
      REQUIRE((used.work == Work::F) == forward);
      REQUIRE(used.work != Work::W);
      REQUIRE(stage_at(schedule.stages, message.to, used.chunk) ==
              stage_at(schedule.stages, message.from, sent.chunk) + (forward ? 1 : -1));
    }
  });
}

#if __has_include("proof/drawn_pipeline.h")
TEST_CASE("of random schedules those are accepted, and laid out in time, whose order ends") {
  Random random(5);
  int accepted = 0, cyclic = 0, out_of_order = 0;
  for (int i = 0; i < 400; ++i) {
    Schedule schedule = random_schedule(random, random.integer(1, 6), random.integer(1, 6));
    CAPTURE(to_text(schedule));
    REQUIRE(is_valid(schedule));
    check_schedule(schedule, "random");
    REQUIRE(parse_schedule(to_text(schedule), "random").actions == schedule.actions);
    const WorkTimes times{1 + random.normal() * 0.1, 0.75, 0.5, 0.125 * double(i % 3)};
    check_times(schedule, simulate_schedule(schedule, times), times);
    // Two actions of a rank in each other's place.
    auto& actions = schedule.actions[random.integer(0, schedule.stages.ranks - 1)];
    const int64_t last = std::ssize(actions) - 1;
    std::swap(actions[random.integer(0, last)], actions[random.integer(0, last)]);
    CAPTURE(to_text(schedule));
    if (is_valid(schedule)) {
      check_schedule(schedule, "random");
      ++accepted;
    } else if (in_order(schedule)) {
      check_throws<UsageError>([&] { check_schedule(schedule, "random"); },
                               {"random: deadlock: rank ", " waits, in its action "});
      REQUIRE(deadlocks(schedule));
      check_throws<Error>([&] { simulate_schedule(schedule, {}); }, {"deadlock"});
      ++cyclic;
    } else {
      check_throws<UsageError>([&] { check_schedule(schedule, "random"); }, {"random: rank "});
      ++out_of_order;
    }
  }
  CAPTURE(accepted, cyclic, out_of_order);
  REQUIRE(std::min({accepted, cyclic, out_of_order}) > 20);
}
#endif

TEST_CASE("a schedule that nobody can run is refused, with rank, action and reason") {
  const auto refuses = [](const std::string& ranks, const std::vector<std::string>& parts,
                          const char* placement = "loop") {
    const std::string text = fmt::format("placement {}\n{}", placement, ranks);
    CAPTURE(text);
    check_throws<UsageError>([&] { check_schedule(parse_schedule(text, "own.txt"), "own.txt"); },
                             parts);
  };
  refuses("0: F0 BW0 BW0\n1: F0 BW0", {"own.txt: rank 0, action 2, BW0: a second time"});
  refuses("0: F0 F0 BW0\n1: F0 BW0", {"rank 0, action 1, F0: a second time"});
  refuses("0: F0 BW0\n1: F0 B0 W0 W0", {"rank 1, action 3, W0: a second time"});
  refuses("0: F0 BW0\n1: F0 BW0 B0", {"rank 1, action 2, B0: a second time"});
  refuses("0: F0 F1 BW0\n1: F0 F1 BW0 BW1", {"own.txt: rank 0: B1 is missing"});
  refuses("0: F0 F1 BW0 BW1\n1: F0 BW0", {"rank 1: F1 is missing"});
  refuses("0: F0 B0\n1: F0 BW0", {"rank 0: W0 is missing"});
  refuses("0: F0 BW0\n1:", {"rank 1: F0 is missing"});
  refuses("0: F0 F0.1 BW0.1 BW0\n1: F0 BW0", {"rank 1: F0.1 is missing"});
  refuses("0: BW0 F0\n1: F0 BW0", {"rank 0, action 0, BW0: before the forward pass, F"});
  refuses("0: F0 B0 W0\n1: F0 W0 B0",
          {"rank 1, action 1, W0: before the gradient of its input, B"});
  refuses("0: F0 BW0 F1 BW1\n1: F0 F1 BW0 BW1",
          {"own.txt: deadlock: ",
           "rank 0 waits, in its action 1, BW0, for the gradient of micro-batch 0 from rank 1",
           "rank 1 waits, in its action 1, F1, for the output of micro-batch 1 from rank 0"});
  refuses("0: F0.1 F0 BW0.1 BW0", {"rank 0 waits, in its action 0, F0.1, for the output of "
                                   "micro-batch 0 from rank 0"});
  refuses("0: F0 BW0\n1: F0 BW0", {"chunks 0 and 1 on every rank, not 1"}, "fold");
  refuses("0: F0 F1.1 BW1.1 BW0\n1: F0 F1.1 BW0 BW1.1\n2: F0 F1.1 BW0 BW1.1",
          {"an even number of ranks and of micro-batches, not 3 and 2; try 4 and 2"}, "mirror");
  refuses("0: F0 F1.1 BW1.1 F1\n1: F0 F1.1 BW0 BW1.1",
          {"rank 0, action 3, F1: this micro-batch passes the stage on the other rank"}, "mirror");
}

TEST_CASE("two passes in turns begin when both can, and are over at once") {
  const auto simulated = [](const char* ranks) {
    const Schedule schedule = parse_schedule(fmt::format("placement loop\n{}", ranks), "own");
    check_schedule(schedule, "own");
    REQUIRE(parse_schedule(to_text(schedule), "own").actions == schedule.actions);
    return simulate_schedule(schedule, {1, 1, 1, 0.5});
  };
  // Rank 1 has micro-batch 1 at 2.5, and is over with both passes three later.
  const auto in_turns = simulated("0: F0 F1 BW0 BW1\n1: F0 BW0&F1 BW1");
  CHECK(in_turns.intervals[1][1].begin == 2.5);
  CHECK(in_turns.intervals[1][2].end == 5.5);
  CHECK(in_turns.intervals[0][2].begin == 6);  // the gradient that both of them made
  CHECK(in_turns.most_in_flight[1] == 2);
  const auto one_by_one = simulated("0: F0 F1 BW0 BW1\n1: F0 BW0 F1 BW1");
  CHECK(one_by_one.intervals[0][2].begin == 5);
  CHECK(one_by_one.most_in_flight[1] == 1);

  const auto refuses = [](const char* ranks, const std::vector<std::string>& parts) {
    CAPTURE(ranks);
    check_throws<UsageError>(
        [&] {
          const std::string text = fmt::format("placement loop\n{}", ranks);
          check_schedule(parse_schedule(text, "own.txt"), "own.txt");
        },
        parts);
  };
  const std::string rule = "a forward and a backward pass, of two micro-batches";
  refuses("0: F0&F1 BW0 BW1", {"own.txt: rank 0, action 0, F0: in turns run two actions, " + rule});
  refuses("0: F0 F1 BW0&BW1", {"rank 0, action 2, BW0", rule});
  refuses("0: F0 B0 F1 W0&B1 W1", {"rank 0, action 3, W0", rule});
  refuses("0: F0&BW0", {"rank 0, action 0, F0", rule});
  refuses("0: F0 F1&BW0&F2 BW1 BW2", {"rank 0, action 1, F1", rule});
  refuses("0: F0 BW0&", {"own.txt, line 2: \"&\" ends a word; try such as F3&BW1"});
  refuses("0: F0 F1&BW0 BW1\n1: F0 BW0&F1 BW1",
          {"own.txt: deadlock: rank 0 waits, in its action 2, BW0, for the gradient of micro-batch "
           "0 from rank 1; rank 1 waits, in its action 2, F1, for the output of micro-batch 1"});
}

TEST_CASE("passes take turns where both can begin, which few schedules can afford",
          "[not_sanitized]") {
  int64_t pairs = 0;
  each_schedule([&](const std::string& name, const ScheduleRequest& r) {
    const Schedule schedule = in_turns(make_schedule(name, r), {});
    check_schedule(schedule, name);
    for (const auto& actions : schedule.actions) {
      pairs += std::ranges::count_if(actions, &Action::with_next);
    }
  });
  REQUIRE(pairs > 1000);
  const auto times = [](const std::string& name, int64_t v) {
    const Schedule schedule = make_schedule(name, request(4, 8, v));
    return std::pair(simulate_schedule(schedule, {}).makespan,
                     simulate_schedule(in_turns(schedule, {}), {}).makespan);
  };
  CHECK(times("1f1b", 1) == std::pair(33.0, 44.0));
  CHECK(times("zb_h1", 1) == std::pair(27.0, 33.0));
  CHECK(times("dualpipe", 1) == std::pair(25.0, 26.0));
  CHECK(times("interleaved", 2) == std::pair(57.0, 57.0));
  CHECK(times("afab", 1) == std::pair(33.0, 33.0));  // none that could
}

TEST_CASE("a text that is no schedule is refused, with line and word") {
  const auto refuses = [](const std::string& text, const std::vector<std::string>& parts) {
    CAPTURE(text);
    check_throws<UsageError>([&] { parse_schedule(text, "own.txt"); }, parts);
  };
  refuses("", {"own.txt has no ranks"});
  refuses("placement loop\n# nothing\n", {"own.txt has no ranks"});
  refuses("0: F0 BW0", {"own.txt, line 1: \"0:\" begins no line", "first \"placement loop\""});
  refuses("placement", {"line 1: \"\" is no placement; try loop, fold or mirror"});
  refuses("# a table\nplacement square\n", {"line 2: \"square\" is no placement"});
  refuses("placement loop 0: F0 BW0", {"line 1: \"0:\""});
  refuses("placement loop\nplacement fold\n", {"line 2: \"placement\" begins no line"});
  refuses("placement loop\n0: F0 BW0\n2: F0 BW0", {"line 3: \"2:\" is not the next rank; try 1:"});
  refuses("placement loop # as usual\n\n0: F0 BW0\nrank 1", {"line 4: \"rank\" begins no line"});
  for (const char* word : {"X1", "F", "F-1", "F0.", "F.1", "B1.2.3", "W1000000", "BWx", "f0"}) {
    refuses(fmt::format("placement loop\n\n0: F0 {} BW0", word),
            {fmt::format("own.txt, line 3: \"{}\" is no action", word), "such as F3 or BW0.1"});
  }
  const Schedule read =
      parse_schedule("# own\nplacement fold # a V\r\n\n0:  F0\tF0.1 # more\n", "");
  REQUIRE(read.actions == std::vector<std::vector<Action>>{{{Work::F, 0, 0}, {Work::F, 0, 1}}});
  REQUIRE(read.stages.placement == Placement::fold);
}

TEST_CASE("what a generator cannot take it refuses, and takes what it proposes") {
  const auto refuses = [](const char* name, const ScheduleRequest& r,
                          const std::vector<std::string>& parts) {
    CAPTURE(name, r.ranks, r.micro_batches);
    check_throws<UsageError>([&] { make_schedule(name, r); }, parts);
  };
  refuses("2f2b", request(2, 2), {"pp_schedule=2f2b is no schedule; try ", "1f1b", "zb_h2"});
  refuses("1f1b", request(2, 2, 3), {"pp_chunks=3; leave out --pp_chunks"});
  refuses("dualpipe", request(3, 7),
          {"not pp_size=3 and grad_acc_steps=7; try --pp_size 4 --grad_acc_steps 8"});
  refuses("dualpipe", request(4, 4),
          {"not pp_size=4 and grad_acc_steps=4; try --pp_size 4 --grad_acc_steps 6"});
  refuses("dualpipe_v", request(3, 4),
          {"not grad_acc_steps=4 with pp_size=3; try --grad_acc_steps 5"});
  check_schedule(make_schedule("dualpipe", request(4, 6)), "proposed");
  check_schedule(make_schedule("dualpipe_v", request(3, 5)), "proposed");
}

TEST_CASE("to evaluate, every micro-batch passes every stage once") {
  for (int64_t m : {1, 2, 5}) {
    for (const Stages& stages : {Stages{Placement::loop, 4, 2}, Stages{Placement::fold, 3, 2},
                                 Stages{Placement::mirror, 4, 2}}) {
      const Schedule schedule = forward_only(stages, m);
      int64_t count = 0;
      for (const auto& actions : schedule.actions) count += std::ssize(actions);
      REQUIRE(count == m * stages.count());
      REQUIRE(!deadlocks(schedule));
      REQUIRE(std::ssize(messages(schedule)) == m * (stages.count() - 1));
    }
  }
}

}  // namespace
}  // namespace usp::test
