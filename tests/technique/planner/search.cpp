#include "planner/search.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "accounting/distinct_ranks.h"
#include "planner/candidates.h"
#include "planner/layout_search.h"
#include "planner/timed.h"
#include "technique/planner/edited_cluster.h"

/// What a search finds, refuses and says.
namespace usp::test {
namespace {

constexpr const char* kSearch =
    "--cluster two_cores --nodes 2 --plan 1024 --seq_len 16 --hidden_size 24 --num_heads 4 "
    "--num_kv_heads 2 --ffn_hidden_size 36 --vocab_size 32 --num_layers 4 ";

Json found(const std::string& flags) {
  const SearchAnswer answer =
      search(layout_of_flags(instead(kSearch, "--plan_best 1000 " + flags + " --plan_json")));
  CHECK(answer.exit_code == 0);
  return Json::parse(answer.text);
}

TEST_CASE("a search puts what fits in the order of its steps, with flags that run") {
  const Json json = found("");
  REQUIRE(json["best"].size() >= 24);
  CHECK(json["ranks"] == 4);
  double before = 0;
  std::set<std::string> seen;
  for (const Json& row : json["best"]) {
    const std::string flags = row["flags"];
    CAPTURE(flags);
    CHECK(seen.insert(flags).second);
    CHECK(row["step_s"] >= before);
    before = row["step_s"];
    const TrainConfig config = layout_of_flags(instead(kSmall, "--vocab_size 32 " + flags));
    CHECK(config.mesh().ranks() == 4);
    CHECK(config.tokens_per_step() == 1024);
    const double tokens = row["tokens_per_s_per_rank"];
    CHECK(tokens == Approx(1024 / 4 / before));
    CHECK(row["bubble"].get<double>() <= 1);
    if (row.contains("shared_s")) CHECK(row["shared_s"] >= before * (1 - 1e-9));
  }
  CHECK(json["best"][9].contains("shared_s"));
}

TEST_CASE("a layout's memory is that of its fullest rank, to the byte") {
  const Json json = found("--zero_stage 1");
  for (const Json& row : json["best"]) {
    const TrainConfig config =
        layout_of_flags(instead(kSmall, "--vocab_size 32 " + row["flags"].get<std::string>()));
    CAPTURE(row["flags"]);
    CHECK(row["gib"] == double(simulate_fullest(config).peak) / (1 << 30));
    CHECK(simulate<Trainer>(config, row["fullest_rank"]).peak == simulate_fullest(config).peak);
  }
}

TEST_CASE("no layout is left out that the formulas put below the fastest step") {
  Cluster cluster = read_cluster("two_cores");
  cluster.ranks_per_node.value = 8;
  cluster.net.latency_us.value = 1e5;  // the formulas count it once, a step for each block
  LayoutSearch search(layout_of_flags(instead(kSearch, "--nodes 8 --plan_best 1")), cluster);
  search.run();
  const double fastest = search.timed().front().replayed.step;
  const auto below = std::ranges::count_if(
      search.candidates().fit, [&](const Candidate& each) { return each.closed_form < fastest; });
  CAPTURE(fastest, search.candidates().fit.size());
  REQUIRE(below > int64_t(LayoutSearch::kAtLeast));  // or nothing is asked
  CHECK(search.replayed() >= std::min<int64_t>(below, LayoutSearch::kAtMost));
}

TEST_CASE("what decides whether a layout fits is its fullest rank, under every schedule") {
  const Cluster cluster = read_cluster("two_cores");
  for (const char* flags : {"", "--pp_schedule afab", "--pp_schedule zb_h1", "--pp_schedule zb_v",
                            "--pp_schedule interleaved --pp_chunks 2"}) {
    const std::string small = "--nodes 4 --num_layers 12 --tp_size 1 --zero_stage 1 ";
    const TrainConfig config = layout_of_flags(instead(kSearch, small + flags));
    const Candidates found = make_candidates(config, cluster);
    CHECK(found.fit.size() > 4);
    for (const Candidate& candidate : found.fit) {
      const Prediction fullest = predict_fullest(candidate.config);
      CAPTURE(layout_flags(candidate.config), candidate.config.pipeline.pp_schedule);
      CHECK(candidate.gib == double(fullest.needed()) / (1 << 30));
      CHECK(candidate.fullest == fullest.rank);
    }
  }
}

TEST_CASE("steady micro-batches that are not recorded cost what they would") {
  const Cluster cluster = read_cluster("two_cores");
  for (const char* flags :
       {"--dp_size 2 --grad_acc_steps 9", "--pp_size 2 --grad_acc_steps 13",
        "--pp_size 4 --grad_acc_steps 32",
        "--pp_size 2 --pp_schedule interleaved --pp_chunks 2 --grad_acc_steps 12",
        "--pp_size 2 --pp_schedule zb_h1 --grad_acc_steps 12",
        "--tp_size 2 --sequence_parallel --dp_size 2 --zero_stage 3 --grad_acc_steps 8"}) {
    const TrainConfig config = layout_of_flags(instead(kSmall, flags));
    const Timed all = time_step({config, 0, 0, "", 0}, cluster, /*all=*/true);
    const Timed few = time_step({config, 0, 0, "", 0}, cluster);
    CAPTURE(flags, all.replayed.step, few.replayed.step);
    CHECK(few.replayed.step == Approx(all.replayed.step).epsilon(1e-9));
    CHECK(few.gib() == all.gib());
    CHECK(few.mfu(cluster) == Approx(all.mfu(cluster)).epsilon(1e-9));
    CHECK(few.replayed.bubble(few.classes) ==
          Approx(all.replayed.bubble(all.classes)).epsilon(1e-6));
  }
}

TEST_CASE("what the command line decides stays as it is") {
  const Json json = found("--tp_size 2 --zero_stage 0 --recompute full");
  REQUIRE(!json["best"].empty());
  for (const Json& row : json["best"]) {
    const std::string flags = row["flags"];
    CAPTURE(flags);
    CHECK(flags.find("--tp_size 2") != std::string::npos);
    CHECK(flags.find("--zero_stage") == std::string::npos);
    CHECK(flags.find("--recompute full") != std::string::npos);
  }
}

/// The shipped machine with another number of GiB.
std::string with_memory(double gib) {
  std::ifstream file(USP_TEST_CLUSTERS "/two_cores.json");
  Json json = Json::parse(file);
  json["memory_gib"]["value"] = gib;
  const std::string path =
      std::filesystem::temp_directory_path() / fmt::format("usp_cluster_{}.json", getpid());
  std::ofstream(path) << json;
  return path;
}

TEST_CASE("what does not fit is left out, and nothing that fits says what is missing") {
  const Json all = found("");
  std::vector<double> gib;
  for (const Json& row : all["best"]) gib.push_back(row["gib"]);
  std::ranges::sort(gib);
  const double middle = gib[gib.size() / 2];
  const std::string file = with_memory(middle);
  const Json some = found("--cluster " + file);
  CHECK(some["fit"].get<int64_t>() < all["fit"].get<int64_t>());
  CHECK(some["too_large"].get<int64_t>() > 0);
  for (const Json& row : some["best"]) CHECK(row["gib"] <= middle);
  with_memory(0.00001);
  check_throws<UsageError>(
      [&] { search(layout_of_flags(instead(kSearch, "--hidden_size 480 --cluster " + file))); },
      {"nothing fits", "GiB on rank", "are missing", "--nodes 4"});
  std::filesystem::remove(file);
}

TEST_CASE("a price makes tokens per second tokens for the money, and none is shipped") {
  Json cluster = slow_cluster();
  CHECK_FALSE(tiny_answer(cluster, "")["best"][0].contains("price_per_million_tokens"));
  cluster["price_per_gpu_hour"] = {{"value", 1.8}, {"source", "assumed"}, {"from", "a test"}};
  const Json answer = tiny_answer(cluster, "");
  for (const Json& row : answer["best"]) {
    const double of_a_rank = row["tokens_per_s_per_rank"].get<double>() * 3600 / 1.8;
    CHECK(row["price_per_million_tokens"].get<double>() == Approx(1e6 / of_a_rank));
  }
  const ClusterFile file(cluster);
  TrainConfig config = tiny_search(cluster, "");
  config.search.cluster = file.path();
  CHECK(search(config).text.find("At 1.8 a GPU and hour, a million tokens cost") !=
        std::string::npos);
}

TEST_CASE("a search says no in one sentence") {
  const auto refused = [](const std::string& flags, const std::vector<std::string>& parts) {
    check_throws<UsageError>([&] { search(layout_of_flags(instead(kSearch, flags))); }, parts);
  };
  refused("--tp_size 3 --num_heads 3 --num_kv_heads 3", {"nodes=2", "tp_size=3", "--nodes 3"});
  refused("--dp_size 4 --micro_batch_size 3", {"none of the", "1024 tokens", "--plan"});
  refused("--require mfu>0.5", {"mfu>0.5", "mfu>=0.4"});
  refused("--require speed>=1", {"speed>=1", "tokens_per_s"});
  refused("--plan 0", {"needs a batch", "--plan"});
  check_throws<UsageError>([] { layout_of_flags("--nodes 2"); }, {"nodes", "--cluster"});
}

TEST_CASE("a requirement that nothing meets ends with an exit code of its own") {
  const auto code = [](const std::string& require) {
    return search(layout_of_flags(instead(kSearch, "--require " + require))).exit_code;
  };
  CHECK(code("mfu>=0.0001,mem<=4") == 0);
  CHECK(code("mfu>=1.5") == 3);
  CHECK(code("mem<=0.0000001") == 3);
}

}  // namespace
}  // namespace usp::test
