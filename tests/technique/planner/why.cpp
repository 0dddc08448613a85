#include "planner/why.h"

#include <numeric>

#include "technique/planner/edited_cluster.h"

/// Two steps, part by part.
namespace usp::test {
namespace {

TEST_CASE("the parts of a step add up to it on every rank") {
  const Cluster cluster = parse_cluster(slow_cluster().dump(), "slow.json");
  std::vector<std::string> layouts = random_layouts(6, 6);
  layouts.push_back(instead(kSmall, "--pp_size 4 --grad_acc_steps 32"));
  for (const std::string& flags : layouts) {
    const Timed timed = time_step({layout_of_flags(flags), 0, 0, "", 0}, cluster);
    const double step = timed.replayed.step;
    for (const RankTime& time : timed.replayed.classes) {
      double sum = 0;
      for (const auto& [part, seconds] : time.parts) sum += seconds;
      CAPTURE(flags, time.rank, sum, step);
      CHECK(std::abs(sum - step) <= 1e-9 * step);
      CHECK(time.parts.at("tail") > 0);
      CHECK(time.parts.at("forward matmul") > 0);
      CHECK(time.parts.contains("bubble") == (time.exposed.contains("pp")));
    }
  }
}

TEST_CASE("the bars between two steps add up to their difference") {
  const Cluster cluster = parse_cluster(slow_cluster().dump(), "slow.json");
  const std::vector<std::string> layouts = random_layouts(5, 7);
  for (size_t i = 0; i + 1 < layouts.size(); ++i) {
    const Timed a = time_step({layout_of_flags(layouts[i]), 0, 0, "", 0}, cluster);
    const Timed b = time_step({layout_of_flags(layouts[i + 1]), 0, 0, "", 0}, cluster);
    double sum = 0, of_a = 0;
    std::set<std::string> names;
    for (const PartOfTwo& part : parts_of_two(a, b)) {
      sum += part.b - part.a;
      of_a += part.a;
      CHECK(names.insert(part.name).second);
    }
    const double difference = b.replayed.step - a.replayed.step;
    CAPTURE(layouts[i], layouts[i + 1], sum, difference);
    CHECK(std::abs(sum - difference) <= 1e-9 * a.replayed.step);
    CHECK(std::abs(of_a - a.replayed.step) <= 1e-9 * a.replayed.step);
  }
}

TEST_CASE("layouts of the list and the flags that they have are explained alike") {
  const Json list = tiny_answer(slow_cluster(), "")["best"];
  const auto asked = [](const std::string& why) {
    TrainConfig config = tiny_search(slow_cluster(), "--plan_json");
    const ClusterFile file(slow_cluster());
    config.search.cluster = file.path();
    config.search.why = why;
    return Json::parse(search(config).text);
  };
  const Json numbers = asked("1; 3");
  CHECK(numbers["a"]["flags"] == list[0]["flags"]);
  CHECK(numbers["a"]["step_s"] == list[0]["step_s"]);
  CHECK(numbers["b"]["flags"] == list[2]["flags"]);
  CHECK(numbers["b"]["gib"] == list[2]["gib"]);
  const std::string third = list[2]["flags"];
  const Json flags = asked("1;" + third);
  CHECK(flags["b"]["step_s"] == numbers["b"]["step_s"]);
  CHECK(flags["parts"] == numbers["parts"]);
  // What no search tries can be asked about as well.
  const Json schedules = asked(
      "--pp_size 2 --micro_batch_size 1 --grad_acc_steps 32; --pp_size 2 --micro_batch_size 1 "
      "--grad_acc_steps 32 --pp_schedule afab");
  CHECK(schedules["a"]["gib"] < schedules["b"]["gib"]);
}

TEST_CASE("what is no layout is refused with one that is") {
  const auto refused = [](const std::string& why, const std::vector<std::string>& parts) {
    TrainConfig config = tiny_search(slow_cluster(), "");
    const ClusterFile file(slow_cluster());
    config.search.cluster = file.path();
    config.search.why = why;
    check_throws<UsageError>([&] { search(config); }, parts);
  };
  refused("1", {"why=1:", "two layouts", "1; 2"});
  refused("1; 2; 3", {"two layouts"});
  refused("1; tp_size 2", {"two layouts", "--tp_size 2"});
  refused("1; 5000", {"5000 is none of them"});
  refused("0; 1", {"0 is none of them"});
  refused("1; --tp_size 3", {"makes 3 ranks", "has 4", "--dp_size 1"});
  refused("1; --tp_size 2", {"256 tokens a step", "has 1024", "--grad_acc_steps 4"});
  refused("1; --micro_batch_size 0", {"micro_batch_size=0"});
  refused("1; --sneed 3", {"--sneed"});
  refused("1; --help", {"--help is no flag of a layout"});
  refused("1; --model 8B", {"--model is no flag of a layout"});  // the base's shape would remain
  refused("1; --nodes=2", {"--nodes=2 is no flag of a layout"});
  refused("1; --estimate", {"--estimate is no flag of a layout"});
  refused("1; --mesh_show table", {"--mesh_show is no flag of a layout"});
  refused("1; --zero_stage 7", {"zero_stage=7", "[0, 3]"});
  refused("1; --ep_size 0", {"ep_size=0"});
  refused("1; --pp_chunks 0", {"pp_chunks=0"});
  refused("1; --seq_len 0", {"seq_len=0"});
  check_throws<UsageError>([] { layout_of_flags("--why 1"); }, {"why", "--cluster"});
}

}  // namespace
}  // namespace usp::test
