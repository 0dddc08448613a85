#include "planner/derivatives.h"

#include <numeric>

#include "planner/change.h"
#include "technique/planner/edited_cluster.h"

/// What a step's time depends on: replays of a record against whole searches with an edited file.
namespace usp::test {
namespace {

/// The numbers of a cluster's file that each derivative is about.
const std::map<std::string, std::vector<std::string>> kNumbers = {
    {"peak", {"peak_tflops.bf16", "peak_tflops.f32", "peak_tflops.f64"}},
    {"bandwidth", {"memory_gbs"}},
    {"node", {"links.node.gbs"}},
    {"net", {"links.net.gbs"}},
    {"latency", {"links.node.latency_us", "links.net.latency_us"}},
    {"launch", {"launch_us"}},
    {"capacity", {"memory_gib"}}};

std::vector<Edit> ten_percent_more(const std::string& of) {
  std::vector<Edit> edits;
  for (const std::string& path : kNumbers.at(of)) edits.push_back(times(path, 1.1));
  return edits;
}

/// What a layout's flags do not say, so that a search has no choice.
constexpr const char* kDecided = "--tp_size 1 --pp_size 1 --zero_stage 0 --recompute none ";

double in_all(const ResourceSeconds& seconds) {
  return std::accumulate(seconds.begin(), seconds.end(), 0.0);
}

TEST_CASE("a derivative is the difference of two searches, of which one has an edited file") {
  std::vector<Json> rows;
  for (const char* flags : {"", "--tp_size 2"}) {
    const Json best = tiny_answer(slow_cluster(), flags)["best"];
    REQUIRE(best.size() == 10);
    rows.insert(rows.end(), best.begin(), best.begin() + 5);
  }
  std::map<std::string, double> most;
  for (const Json& row : rows) {
    const std::string flags = instead(kDecided, row["flags"]);
    for (const auto& [of, change] : row["plus_10_percent"].items()) {
      const Json then = tiny_answer(slow_cluster(ten_percent_more(of)), flags);
      const double difference =
          then["best"][0]["step_s"].get<double>() / row["step_s"].get<double>() - 1;
      CAPTURE(flags, of, difference, change.get<double>());
      REQUIRE(then["best"].size() == 1);
      CHECK(std::abs(change.get<double>() - difference) <= 0.001);
      most[of] = std::max(most[of], std::abs(difference));
    }
  }
  for (const auto& [of, difference] : most) {
    CAPTURE(of, difference);
    CHECK(difference > 0.002);  // or nothing has been compared
  }
  CHECK(most.size() == kResources);
}

TEST_CASE("what 10 % more memory changes is what a search on such a cluster finds") {
  bool some = false;
  const Json all = tiny_answer(slow_cluster(), "--plan_best 1000");
  std::vector<double> gib;
  for (const Json& row : all["best"]) gib.push_back(row["gib"]);
  std::ranges::sort(gib);
  for (size_t i = gib.size() / 8; i < gib.size(); i += gib.size() / 8) {
    const Edit full = [&](Json& json) { json["memory_gib"]["value"] = gib[i] * 0.999 / 1.05; };
    const Json now = tiny_answer(slow_cluster({full}), "");
    const Json then = tiny_answer(slow_cluster({full, times("memory_gib", 1.1)}), "");
    const double difference =
        then["best"][0]["step_s"].get<double>() / now["best"][0]["step_s"].get<double>() - 1;
    CHECK(now["plus_10_percent_capacity"]["step"] == difference);
    CHECK(now["plus_10_percent_capacity"]["flags"] == then["best"][0]["flags"]);
    some |= difference < 0;
  }
  CHECK(some);
}

TEST_CASE("the seconds of a critical path add up to the step, and say what little changes do") {
  std::vector<std::string> layouts = random_layouts(6, 4);
  layouts.push_back(
      instead(kSmall, "--pp_size 2 --grad_acc_steps 16"));  // goes on from two records
  layouts.push_back(instead(kSmall, "--dp_size 4 --zero_stage 3 --grad_acc_steps 12"));
  const Cluster cluster = parse_cluster(slow_cluster().dump(), "slow.json");
  for (const std::string& flags : layouts) {
    SegmentRecords records;
    const RecordedStep step({layout_of_flags(flags), 0, 0, "", 0}, 2, records);
    const Timed timed = step.time(cluster);
    const double now = timed.replayed.step;
    CAPTURE(flags, now);
    CHECK(std::abs(in_all(timed.replayed.critical) - now) <= 1e-9 * now);
    CHECK(step.along(timed, cluster) == Approx(now).epsilon(1e-12));
    for (int i = 0; i < kResources; ++i) {
      constexpr double kLittle = 1e-6;
      const std::string of(name(Resource(i)));
      const Cluster other = changed(cluster, of, 1 + kLittle);
      const double change = (step.time(other).replayed.step - now) / kLittle;
      const bool is_time = Resource(i) == Resource::latency || Resource(i) == Resource::launch;
      const double path = timed.replayed.critical[i] * (is_time ? 1 : -1);
      CAPTURE(of, change, path);
      CHECK(std::abs(change - path) <= 1e-4 * now);
    }
  }
}

TEST_CASE("where another path becomes critical the old one is shorter or longer than the step") {
  const Cluster cluster = parse_cluster(slow_cluster().dump(), "slow.json");
  int changes = 0, stays = 0;
  std::vector<std::string> layouts = random_layouts(2, 5);
  for (const char* flags : {"--zero_stage 1", "--zero_stage 0"}) {  // their hosts are just in time
    layouts.push_back(instead(kSmall,
                              "--dp_size 2 --pp_size 2 --micro_batch_size 8 "
                              "--grad_acc_steps 4 --vocab_size 32 " +
                                  std::string(flags)));
  }
  for (const std::string& flags : layouts) {
    SegmentRecords records;
    const RecordedStep step({layout_of_flags(flags), 0, 0, "", 0}, 2, records);
    const Timed timed = step.time(cluster);
    for (const Derivative& derivative : derivatives(step, timed, cluster)) {
      const Cluster other = changed(cluster, std::string(name(derivative.of)), 1.1);
      const double along = step.along(timed, other) / timed.replayed.step - 1;
      CAPTURE(flags, name(derivative.of));
      CHECK(derivative.old_path == along);
      CHECK(derivative.new_path == (std::abs(along - derivative.change) > 1e-9));
      (derivative.new_path ? changes : stays) += 1;
    }
  }
  CHECK(changes > 0);
  CHECK(stays > 0);
}

}  // namespace
}  // namespace usp::test
