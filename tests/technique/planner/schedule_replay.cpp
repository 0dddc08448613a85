#include "planner/schedule_replay.h"

#include "planner/replay.h"
#include "technique/planner/written.h"

/// Steps by products of matrices: by hand, and as the replay of every event finds them.
namespace usp::test {
namespace {

MaxPlus matrix_of(const std::vector<std::vector<double>>& rows) {
  MaxPlus matrix(static_cast<int>(rows.size()), static_cast<int>(rows[0].size()));
  for (int i = 0; i < matrix.rows(); ++i) std::ranges::copy(rows[i], matrix.row(i).begin());
  return matrix;
}

std::vector<double> items_of(const MaxPlus& matrix) {
  std::vector<double> items;
  for (int i = 0; i < matrix.rows(); ++i) {
    items.insert(items.end(), matrix.row(i).begin(), matrix.row(i).end());
  }
  return items;
}

TEST_CASE("a product of matrices over max and plus does first what stands on its right") {
  const MaxPlus a = matrix_of({{3, kNever}, {5, 0}}), b = matrix_of({{0, 1}, {kNever, 2}});
  CHECK(items_of(a * b) == std::vector<double>{3, 4, 5, 6});
  CHECK(items_of(b * a) == std::vector<double>{6, 1, 7, 2});
  CHECK(items_of(MaxPlus::identity(2) * a) == items_of(a));
  CHECK(items_of(a * MaxPlus::identity(2)) == items_of(a));

  const std::vector<double> times = {10, 20};
  std::vector<double> one(2), other(2);
  b.apply(times, one);
  CHECK(one == std::vector<double>{21, 22});
  a.apply(one, other);
  (a * b).apply(times, one);
  CHECK(one == other);
  check_throws<Error>([&] { matrix_of({{1, 2, 3}}) * a; }, {"3 columns cannot wait for 2 rows"});
}

constexpr CommKind kHandGather = CommKind::all_gather;  // of two ranks: 1 us, half of its bytes

/// The step of two ranks that are one class, and of which this is the first.
double step_of_class(const Program& program) {
  const Cluster cluster = round_cluster(8);
  const RankClasses classes{{0, 0}, {0}, {2}};
  Cost cost(cluster);
  ScheduleReplay matrices({program}, classes);
  matrices.price(cost);
  CHECK(matrices.time().step == Approx(replay({program}, classes, cost).step));
  return matrices.time().step;
}

TEST_CASE("what one action has posted and another waits for is in the state between them") {
  // 11 us for the exchange, under 4 + 3 us; then 5 us.
  CHECK(step_of_class(Written(0, {0, 1})
                          .post(kHandGather, 20)
                          .compute(4)
                          .next_pass()
                          .compute(3)
                          .wait(0)
                          .compute(5)
                          .take()) == Approx(16e-6));
  // The same between two blocks of an action.
  CHECK(step_of_class(Written(0, {0, 1})
                          .post(kHandGather, 20)
                          .compute(4)
                          .next_block()
                          .compute(3)
                          .wait(0)
                          .compute(5)
                          .take()) == Approx(16e-6));
}

TEST_CASE("an exchange of one action waits for the exchange of another in its queue") {
  CHECK(step_of_class(Written(0, {0, 1})
                          .post(kHandGather, 200)
                          .compute(1)
                          .next_pass()
                          .post(kHandGather, 20)
                          .wait(1)
                          .compute(2)
                          .wait(0)
                          .take()) == Approx(114e-6));  // 101 us, 11 us, 2 us
}

TEST_CASE("the state at the end of a step is where the next one begins") {
  // The exchange takes 101 us from the end of a step; 5 us of them are hidden.
  CHECK(step_of_class(Written(0, {0, 1})
                          .compute(5)
                          .wait_last(0)
                          .next_pass()
                          .compute(10)
                          .post(kHandGather, 200)
                          .take()) == Approx(111e-6));
}

TEST_CASE("layers and micro-batches that are alike share their matrices") {
  const auto size = [](const std::string& flags) {
    const TrainConfig config = layout_of_flags(
        instead(kSmall, "--dp_size 2 --tp_size 2 --vocab_size 32 --zero_stage 3 " + flags));
    const RankClasses classes = classes_of_ranks(config, 4);
    return ScheduleReplay(record_classes(config, classes), classes).size();
  };
  const ScheduleReplay::Size small = size("--num_layers 4 --grad_acc_steps 4");
  const ScheduleReplay::Size deep = size("--num_layers 8 --grad_acc_steps 4");
  const ScheduleReplay::Size large = size("--num_layers 4 --grad_acc_steps 8");
  CHECK(deep.events > 3 * small.events / 2);
  CHECK(deep.blocks == small.blocks);
  CHECK(deep.products == small.products);
  CHECK(large.events > 3 * small.events / 2);
  CHECK(large.blocks == small.blocks);
  CHECK(large.actions == small.actions);
}

TEST_CASE("products of matrices take as long as the replay of every event") {
  double worst = 0;
  int64_t number = 0;
  const int count = kSanitized                              ? 3
                    : is_carried("planner/schedule_replay") ? 10
                    : is_full()                             ? 200
                                                            : 50;
  for (const std::string& flags : random_layouts(count, 11 + turn())) {
    const TrainConfig config = layout_of_flags(flags);
    const int64_t ranks_per_node = std::vector{1, 2, 4, 8}[number % 4];
    const Cluster cluster = uneven_cluster(ranks_per_node, number % 2 == 1);
    // Of each for itself every exchange is one with other classes.
    const RankClasses classes =
        number++ % 16 == 0 ? each_for_itself(config) : classes_of_ranks(config, ranks_per_node);
    const std::vector<Program> programs = record_classes(config, classes);
    Cost cost(cluster);
    const Replayed events = replay(programs, classes, cost);
    ScheduleReplay matrices(programs, classes);
    matrices.price(cost);
    const ScheduleTime found = matrices.time();
    CAPTURE(flags, ranks_per_node, classes.ranks.size(), events.step, found.step);
    CHECK(found.step > 0);
    CHECK(found.gradients == Approx(events.gradients).epsilon(1e-9));
    worst = std::max(worst, std::abs(found.step / events.step - 1));
    CHECK(worst <= 1e-6);
  }
  CAPTURE(worst);
  CHECK(worst <= 1e-9);
}

TEST_CASE("where ranks wait for each other for ever, products end with an error") {
  std::vector<Program> programs;
  for (int rank = 0; rank < 2; ++rank) {
    programs.push_back(Written(rank, {0, 1})
                           .group("tp")
                           .post(kHandGather, 10, -1, rank)
                           .wait(0)
                           .post(kHandGather, 10, -1, 1 - rank)
                           .wait(1)
                           .take());
  }
  const Cluster cluster = round_cluster(8);
  Cost cost(cluster);
  ScheduleReplay matrices(programs, so_many(2));
  matrices.price(cost);
  check_throws<Error>([&] { matrices.time(); }, {"the ranks wait for each other for ever"});
}

}  // namespace
}  // namespace usp::test
