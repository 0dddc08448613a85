#include "planner/shared_replay.h"

#include "planner/replay.h"
#include "technique/planner/written.h"

/// Steps whose exchanges divide links and slow kernels down: by hand, and beside the replay.
namespace usp::test {
namespace {

constexpr CommKind kSharedGather =
    CommKind::all_gather;  // of two ranks: 1 us, and half of its bytes

/// The step of two ranks with this program, each a class of its own.
double shared_by_two(const std::function<void(Written&)>& write, const Sharing& sharing) {
  const Cluster cluster = round_cluster(8);
  Cost cost(cluster);
  std::vector<Program> programs;
  for (int rank = 0; rank < 2; ++rank) {
    Written program(rank, {0, 1});
    write(program.group("tp"));
    programs.push_back(program.take());
  }
  return shared_step(programs, so_many(2), cost, sharing);
}

TEST_CASE("exchanges that are under way at once divide their link, their latencies do not") {
  const auto two = [](Written& program) {
    program.post(kSharedGather, 200)
        .post(kSharedGather, 20, -1, /*group=*/1)
        .wait(1)
        .compute(1)
        .wait(0);
  };
  // 1 us of latency; 10 us at half speed; the 90 us that the longer one has left.
  CHECK(shared_by_two(two, {.links = Sharing::fair}) == Approx(111e-6));
  CHECK(shared_by_two(two, {.links = Sharing::apart}) == Approx(101e-6));
  const auto later = [](Written& program) {
    program.post(kSharedGather, 200).compute(50).post(kSharedGather, 20, -1, 1).wait(1).wait(0);
  };
  CHECK(shared_by_two(later, {.links = Sharing::fair}) ==
        Approx(111e-6));                     // 50 us of which it is alone
  const auto turns = [](Written& program) {  // of one communicator: one after the other
    program.post(kSharedGather, 200).post(kSharedGather, 20).wait(1).wait(0);
  };
  CHECK(shared_by_two(turns, {.links = Sharing::fair}) == Approx(112e-6));
}

TEST_CASE("a kernel is slower beside an exchange, and as fast as alone before and after it") {
  const auto step = [](int64_t before, int64_t under) {
    return shared_by_two(
        [&](Written& program) {
          program.compute(before).post(kSharedGather, 200).compute(under).wait(0).compute(7);
        },
        {.beside = 0.5});
  };
  CHECK(step(3, 20) == Approx(111e-6));    // 40 us, under 101 us
  CHECK(step(3, 80) == Approx(140.5e-6));  // half of the 101 us, then the 29.5 us that are left
}

TEST_CASE("where nothing is shared, a step is the replay's") {
  int64_t layouts = 0, longer = 0;
  for (const std::string& flags : random_layouts(kSanitized ? 4 : 40, 91 + turn())) {
    const TrainConfig config = layout_of_flags(flags);
    const int64_t ranks_per_node = std::vector{1, 2, 4, 8}[layouts % 4];
    const Cluster cluster = uneven_cluster(ranks_per_node, layouts++ % 2 == 1);
    const RankClasses classes = classes_of_ranks(config, ranks_per_node);
    const std::vector<Program> programs = record_classes(config, classes);
    Cost cost(cluster);
    CAPTURE(flags, ranks_per_node);
    const double alone = replay(programs, classes, cost).step;
    CHECK(shared_step(programs, classes, cost, {.links = Sharing::apart}) ==
          Approx(alone).epsilon(1e-9));
    longer += shared_step(programs, classes, cost, {.beside = 0.5}) > alone * 1.001;
  }
  CHECK(longer > layouts / 4);  // or little is shared
}

/// A recorded run of two ranks with these programs, in us; messages come 3 us later.
RecordedRun recorded_by_two(const std::function<void(Written&, int)>& write, double cores = 2) {
  std::vector<Program> programs;
  std::vector<ProgramSeconds> seconds(2);
  for (int rank = 0; rank < 2; ++rank) {
    Written program(rank, {0, 1});
    write(program.group("tp"), rank);
    programs.push_back(program.take());
    for (const Kernel& kernel : programs.back().kernels) {
      seconds[rank].kernels.push_back(double(kernel.bytes) / 1000);
    }
    for (const Exchange& exchange : programs.back().exchanges) {
      const double busy = double(exchange.payload_bytes) / 1000;
      seconds[rank].exchanges.push_back({.busy = busy, .arrives = busy + 3, .latency = 3});
      seconds[rank].keeps.push_back(1);
    }
  }
  return replay_recorded(programs, seconds, {.links = Sharing::in_turns, .cores = cores});
}

TEST_CASE("in a recorded run links serve exchanges in turns, and ranks share cores") {
  const auto two = [](Written& program, int) {
    program.post(kSharedGather, 200).compute(10).post(kSharedGather, 20, -1, 1).wait(1).wait(0);
  };
  for (const RecordedRank& rank : recorded_by_two(two).ranks) {
    CHECK(rank.posts == std::vector{0.0, 10.0});
    CHECK(rank.exchanges[1].begin == 200);
    CHECK(rank.waits[0].begin == 10);
    CHECK(rank.waits[0].end == 220);
    CHECK(rank.waits[1].end == 220);
  }
  const auto uneven = [](Written& program, int rank) { program.compute(10 + 20 * rank); };
  const RecordedRun of_one_core = recorded_by_two(uneven, 1);
  CHECK(of_one_core.ranks[0].end == Approx(20));  // at half of its speed
  CHECK(of_one_core.ranks[1].end == Approx(40));
  CHECK(of_one_core.speeds.back().from == Approx(20));
  CHECK(of_one_core.speeds.back().share == 1);
}

TEST_CASE("a recorded message is awaited until it comes, and one that is not sent for ever") {
  const auto sent = [](Written& program, int rank) {
    program.post(rank == 0 ? CommKind::send : CommKind::recv, 50, 1 - rank).wait(0);
  };
  const RecordedRun run = recorded_by_two(sent);
  CHECK(run.ranks[0].waits[0].end == 50);
  CHECK(run.ranks[1].waits[0].end == 53);
  const auto stuck = [](Written& program, int rank) {
    program.post(CommKind::recv, 50, 1 - rank).wait(0).post(CommKind::send, 50, 1 - rank);
  };
  for (const RecordedRank& rank : recorded_by_two(stuck).ranks) {
    CHECK(std::isinf(rank.waits.back().end));
    CHECK(rank.posts.size() == 1);
  }
}

}  // namespace
}  // namespace usp::test
