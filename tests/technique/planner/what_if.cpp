#include "planner/what_if.h"

#include "planner/change.h"
#include "technique/planner/edited_cluster.h"

/// A search beside the same one on a changed cluster.
namespace usp::test {
namespace {

SearchAnswer asked(const std::string& what_if, const std::string& flags = "") {
  const ClusterFile file(slow_cluster());
  TrainConfig config = tiny_search(slow_cluster(), flags + " --plan_json");
  config.search.cluster = file.path();
  config.search.what_if = what_if;
  return search(config);
}

TEST_CASE("a changed cluster's answer is that of a search with an edited file") {
  const std::vector<std::pair<std::string, Edit>> changes = {
      {"peak=+50%", times("peak_tflops.bf16", 1.5)},
      {"bandwidth=-50%", times("memory_gbs", 0.5)},
      {"node=+400%", times("links.node.gbs", 5)},
      {"net=-80%", times("links.net.gbs", 0.2)},
      {"launch=+900%", times("launch_us", 10)},
      {"capacity=-99.97%", times("memory_gib", 0.0003)}};
  const Json before = tiny_answer(slow_cluster(), "--dtype bf16");
  int others = 0, steps = 0;
  for (const auto& [change, edit] : changes) {
    const SearchAnswer answer = asked(change, "--dtype bf16");
    const Json found = Json::parse(answer.text);
    const Json edited = tiny_answer(slow_cluster({edit}), "--dtype bf16");
    CAPTURE(change);
    CHECK(answer.exit_code == 0);
    CHECK(found["now"]["step_s"] == before["best"][0]["step_s"]);
    CHECK(found["now"]["flags"] == before["best"][0]["flags"]);
    CHECK(found["then"]["step_s"].get<double>() ==
          Approx(edited["best"][0]["step_s"].get<double>()).epsilon(1e-12));
    CHECK(found["then"]["flags"] == edited["best"][0]["flags"]);
    CHECK(found["then"]["fit"] == edited["fit"]);
    steps += found["then"]["step_s"] != found["now"]["step_s"];
    if (found["then"]["flags"] == found["now"]["flags"]) continue;
    ++others;
    if (found.contains("now_then_step_s")) {
      CHECK(found["now_then_step_s"] >= found["then"]["step_s"]);
    }
  }
  CHECK(others > 0);
  CHECK(steps >= int(changes.size()) - 1);  // the best layout may send nothing inside a node
}

TEST_CASE("nodes that come or go leave a search with the rest, and a batch that they divide") {
  const Json less = Json::parse(asked("ranks=-2").text);
  const Json one = tiny_answer(slow_cluster(), "--nodes 1");
  CHECK(less["then"]["ranks"] == 2);
  CHECK(less["then"]["tokens"] == 1024);
  CHECK(less["then"]["step_s"] == one["best"][0]["step_s"]);
  CHECK(less["then"]["flags"] == one["best"][0]["flags"]);
  CHECK(!less.contains("now_then_step_s"));
  const Json more = Json::parse(asked("ranks=+2").text);  // of 64 samples, six ranks want 66
  CHECK(more["then"]["ranks"] == 6);
  CHECK(more["then"]["tokens"] == 66 * 16);
  const double step = more["then"]["step_s"];
  CHECK(more["then"]["tokens_per_s"] == Approx(66 * 16 / step));
}

TEST_CASE("another cluster's cards bring their numbers and the links among them") {
  const Cluster slow = parse_cluster(slow_cluster().dump(), "slow.json");
  const Cluster cards = read_cluster("a100");
  const Cluster both = with_cards(slow, cards);
  CHECK(both.peak_tflops.at(DType::bf16).value == cards.peak_tflops.at(DType::bf16).value);
  CHECK(both.memory_gbs.value == cards.memory_gbs.value);
  CHECK(both.memory_gib.value == cards.memory_gib.value);
  CHECK(both.matmul.value == cards.matmul.value);
  CHECK(both.attention.value == cards.attention.value);
  CHECK(both.memory.value == cards.memory.value);
  CHECK(both.half_width.value == cards.half_width.value);
  CHECK(both.half_depth.value == cards.half_depth.value);
  CHECK(both.launch_us.value == cards.launch_us.value);
  CHECK(both.node.gbs.value == cards.node.gbs.value);
  CHECK(both.net.gbs.value == slow.net.gbs.value);
  CHECK(both.ranks_per_node.value == slow.ranks_per_node.value);
  CHECK(both.nics_per_node.value == slow.nics_per_node.value);
  const Json found = Json::parse(asked("gpu=a100,net=+1%").text);
  CHECK(found["then"]["step_s"] < found["now"]["step_s"]);
}

TEST_CASE(
    "a cluster on which nothing fits, or nothing is as required, has an exit code of its own") {
  const SearchAnswer nothing = asked("capacity=-99.99999%");
  CHECK(nothing.exit_code == kNothingAsRequired);
  const std::string why = Json::parse(nothing.text)["then"]["nothing"];
  CHECK(why.find("nothing fits") != std::string::npos);
  CHECK(asked("peak=+1%", "--require mfu>=1.5").exit_code == kNothingAsRequired);
}

TEST_CASE("cards that cannot compute in the run's dtype are an answer, beside that of now") {
  const ClusterFile cards(slow_cluster({[](Json& json) { json["peak_tflops"].erase("bf16"); }}));
  const std::string change = "gpu=" + cards.path();
  const SearchAnswer answer = asked(change, "--dtype bf16");
  const Json found = Json::parse(answer.text);
  CHECK(answer.exit_code == kNothingAsRequired);
  CHECK(found["now"]["step_s"].get<double>() > 0);
  CHECK(found["then"]["nothing"].get<std::string>().find("has no peak") != std::string::npos);
  const ClusterFile file(slow_cluster());
  TrainConfig config = tiny_search(slow_cluster(), "--dtype bf16");
  config.search.cluster = file.path();
  config.search.what_if = change;
  CHECK(search(config).text.find("then: dtype=bf16: ") != std::string::npos);
}

TEST_CASE("a change that is none is refused with one that is") {
  for (const char* change :
       {"net", "net=", "net=+100", "net=100%", "net=-100%", "net=+x%", "net=+inf%", "speed=+1%",
        "gpu=", "ranks=8", "ranks=-0", "ranks=+1.5", "net=+1%,"}) {
    CAPTURE(change);
    check_throws<UsageError>([&] { parse_changes(change); }, {change, "try net=+100%"});
  }
  check_throws<UsageError>([] { parse_changes("net=+1%,net=+2%"); }, {"net changes twice"});
  check_throws<UsageError>([] { asked("ranks=-3"); }, {"whole nodes", "ranks=-2"});
  check_throws<UsageError>([] { asked("ranks=-4"); }, {"one stays", "ranks=-2"});
  check_throws<UsageError>([] { asked("net=+1%,gpu=h300"); },
                           {"what_if=net=+1%,gpu=h300: gpu=h300", "h100_nvl8"});
  check_throws<UsageError>([] { layout_of_flags("--what_if net=+1%"); }, {"what_if", "--cluster"});
  check_throws<UsageError>([] { tiny_search(slow_cluster(), "--why 1;2 --what_if net=+1%"); },
                           {"two questions"});
}

}  // namespace
}  // namespace usp::test
