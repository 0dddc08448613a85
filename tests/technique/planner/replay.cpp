#include "planner/replay.h"

#include "planner/schedule_replay.h"
#include "technique/planner/written.h"

/// Programs laid out in time: by hand, and folded as all ranks would be.
namespace usp::test {
namespace {

/// The step of these ranks, in one node, where a message has 1 us of latency. By products of
/// matrices it takes as long.
Replayed replayed(const std::vector<Program>& programs, double launch_us = 0) {
  Cluster cluster = round_cluster(8);
  cluster.launch_us.value = launch_us;
  Cost cost(cluster);
  const RankClasses classes = so_many(static_cast<int>(programs.size()));
  const Replayed found = replay(programs, classes, cost);
  ScheduleReplay matrices(programs, classes);
  matrices.price(cost);
  CHECK(matrices.time().step == Approx(found.step));
  CHECK(matrices.time().gradients == Approx(found.gradients));
  return found;
}

constexpr CommKind kGather = CommKind::all_gather;  // of two ranks: 1 us, and half of its bytes

TEST_CASE("a collective begins when its last member has come, and is hidden while one computes") {
  const auto step = [](int64_t first, int64_t second, int64_t under) {
    std::vector<Program> programs;
    for (int rank = 0; rank < 2; ++rank) {
      programs.push_back(Written(rank, {0, 1})
                             .compute(rank == 0 ? first : second)
                             .post(kGather, 20)
                             .compute(under)
                             .wait(0)
                             .compute(5)
                             .take());
    }
    return replayed(programs);
  };
  // 30 us until both are there, 11 us for the exchange, 5 us.
  CHECK(step(10, 30, 0).step == Approx(46e-6));
  CHECK(step(30, 10, 0).step == Approx(46e-6));
  CHECK(step(30, 10, 4).step == Approx(46e-6));
  CHECK(step(30, 30, 20).step == Approx(55e-6));
  const Replayed found = step(10, 30, 4);
  CHECK(found.classes[1].exposed.at("dp") == Approx(7e-6));
  CHECK(found.classes[0].exposed.at("dp") == Approx(27e-6));
  CHECK(found.classes[0].computes == Approx(19e-6));
  CHECK(step(30, 30, 20).classes[0].exposed.at("dp") == 0);
}

TEST_CASE("a communicator carries out one exchange after the other, another one beside it") {
  const auto step = [](int second_group) {
    std::vector<Program> programs;
    for (int rank = 0; rank < 2; ++rank) {
      programs.push_back(Written(rank, {0, 1})
                             .group("tp")
                             .post(kGather, 200)
                             .post(kGather, 20, -1, second_group)
                             .wait(1)
                             .compute(1)
                             .wait(0)
                             .take());
    }
    return replayed(programs);
  };
  CHECK(step(0).step == Approx(113e-6));  // 101 us, then 11 us, then 1 us
  CHECK(step(1).step == Approx(101e-6));
  CHECK(step(1).classes[0].exposed.at("tp") == Approx(11e-6));
  CHECK(step(1).classes[0].exposed.at("dp") == Approx(89e-6));
}

TEST_CASE(
    "a message leaves after the one before it, and is there whether or not it was asked for") {
  const Program sender = Written(0, {0, 1})
                             .post(CommKind::send, 10, 1)
                             .post(CommKind::send, 10, 1)
                             .compute(100)
                             .wait(0)
                             .wait(1)
                             .take();
  const Program receiver = Written(1, {0, 1})
                               .post(CommKind::recv, 10, 0)
                               .wait(0)
                               .compute(2)
                               .post(CommKind::recv, 10, 0)
                               .wait(1)
                               .compute(90)
                               .take();
  const Replayed found = replayed({sender, receiver});
  // The receiver of the second step: 100 us later, since the sender begins then.
  CHECK(found.classes[0].exposed.at("dp") == 0);
  CHECK(found.classes[1].computes == Approx(92e-6));
  CHECK(found.step == Approx(100e-6));
}

TEST_CASE("what a step leaves to the next one is waited for there") {
  std::vector<Program> programs;
  for (int rank = 0; rank < 2; ++rank) {
    programs.push_back(
        Written(rank, {0, 1}).compute(5).wait_last(0).compute(10).post(kGather, 200).take());
  }
  // The exchange takes 101 us from the end of a step; 5 us of them are hidden.
  CHECK(replayed(programs).step == Approx(111e-6));
}

TEST_CASE("a device that is faster than its host starves") {
  const Program program = Written(0, {0}).compute(1).compute(1).compute(1).compute(1).take();
  CHECK(replayed({program}, /*launch_us=*/0).step == Approx(4e-6));
  const Replayed slow = replayed({program}, /*launch_us=*/3);
  CHECK(slow.step == Approx(13e-6));
  CHECK(slow.classes[0].starves == Approx(9e-6));
  Cluster cluster = round_cluster(8);
  cluster.launch_us.value = 3;
  cluster.host_computes = true;
  Cost cost(cluster);
  CHECK(replay({program}, so_many(1), cost).step == Approx(16e-6));  // it cannot run ahead
}

TEST_CASE("ranks that wait for each other for ever are named, with where they wait") {
  std::vector<Program> programs;
  for (int rank = 0; rank < 2; ++rank) {
    programs.push_back(Written(rank, {0, 1})
                           .group("tp")
                           .post(kGather, 10, -1, rank)
                           .wait(0)
                           .post(kGather, 10, -1, 1 - rank)
                           .wait(1)
                           .take());
  }
  check_throws<Error>([&] { replayed(programs); },
                      {"rank 0 waits for all_gather #1 of dp, in B of micro-batch 3",
                       "rank 1 waits for all_gather #1 of tp", "block 5"});
  check_throws<Error>(
      [] {
        replayed({Written(0, {0, 1}).post(CommKind::recv, 10, 1).wait(0).take(),
                  Written(1, {0, 1}).compute(1).take()});
      },
      {"rank 0 waits for recv #1 of dp with rank 1"});
}

TEST_CASE("one rank of each class takes as long as all ranks, to the bit") {
  double worst = 0;
  int64_t number = 0;
  for (const std::string& flags : random_layouts(kSanitized ? 3 : 50, 5 + turn())) {
    const TrainConfig config = layout_of_flags(flags);
    const int64_t ranks_per_node = std::vector{1, 2, 4, 8}[number % 4];
    const Cluster cluster = uneven_cluster(ranks_per_node, number++ % 2 == 1);
    const RankClasses classes = classes_of_ranks(config, ranks_per_node);
    const RankClasses all = each_for_itself(config);
    Cost cost(cluster), of_all(cluster);
    const Replayed folded = replay(record_classes(config, classes), classes, cost);
    const Replayed unfolded = replay(record_classes(config, all), all, of_all);
    CAPTURE(flags, ranks_per_node, classes.ranks.size());
    for (int rank = 0; rank < std::ssize(all.of_rank); ++rank) {
      CAPTURE(rank);
      const RankTime& own = folded.classes[classes.of_rank[rank]];
      CHECK(own.first_gradients == unfolded.classes[rank].first_gradients);
    }
    CHECK(folded.step > 0);
    worst = std::max(worst, std::abs(folded.step / unfolded.step - 1));
  }
  CAPTURE(worst);
  CHECK(worst <= 1e-3);
}

TEST_CASE("whatever order the ranks are visited in, the step is the same") {
  const TrainConfig config = layout_of_flags(
      instead(kSmall, "--dp_size 2 --pp_size 2 --tp_size 2 --zero_stage 3 --grad_acc_steps 4"));
  const RankClasses forwards = each_for_itself(config);
  RankClasses backwards = forwards;
  std::ranges::reverse(backwards.representative);
  std::ranges::reverse(backwards.of_rank);
  const Cluster cluster = uneven_cluster(4, false);
  Cost one(cluster), other(cluster);
  CHECK(replay(record_classes(config, forwards), forwards, one).step ==
        replay(record_classes(config, backwards), backwards, other).step);
}

}  // namespace
}  // namespace usp::test
