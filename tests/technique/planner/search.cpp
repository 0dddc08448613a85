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
        "--pp_size 2 --pp_schedule afab --grad_acc_steps 12",
        "--overlap_dispatch --grad_acc_steps 9",
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
  std::filesystem::remove(file);
}

/// What a search with these flags is refused with; empty: it is not.
std::string refusal(const std::string& flags) {
  try {
    search(layout_of_flags(instead(kSearch, flags)));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

/// The number behind these words.
std::string after(const std::string& text, const std::string& words) {
  const size_t at = text.find(words);
  REQUIRE(at != std::string::npos);
  const size_t begin = at + words.size();
  return text.substr(begin, text.find_first_not_of("0123456789.", begin) - begin);
}

TEST_CASE("what a search advises where nothing fits works when it is tried") {
  const auto least = [](int64_t nodes) {
    const Json all = found(fmt::format("--num_layers 8 --nodes {}", nodes));
    double gib = HUGE_VAL;
    for (const Json& row : all["best"]) gib = std::min(gib, row["gib"].get<double>());
    return gib;
  };
  REQUIRE(least(16) < least(4));
  const std::string own = with_memory((least(4) + least(16)) / 2),
                    flags = "--num_layers 8 --cluster " + own;
  const std::string few = refusal(flags);
  CAPTURE(few);
  for (const char* part :
       {"plan=1024: nothing fits", "GiB on rank", "are missing", "try --nodes "}) {
    CHECK(few.find(part) != std::string::npos);
  }
  const int64_t nodes = std::stoll(after(few, "try --nodes "));
  CHECK(nodes > 2);
  CHECK(refusal(fmt::format("{} --nodes {}", flags, nodes)).empty());
  CHECK(!refusal(fmt::format("{} --nodes {}", flags, nodes / 2)).empty());  // no fewer, by doubling

  const std::string sizes = " --nodes 16 --zero_stage 0 ", stages = " --pp_size 1 ";
  const std::string kept = refusal(flags + sizes + stages);
  CAPTURE(kept);
  CHECK(kept.find("try --nodes") == std::string::npos);
  CHECK(kept.find("leave out --pp_size") != std::string::npos);
  CHECK(refusal(flags + sizes).empty());

  with_memory(1e-6);
  const std::string none = refusal("--hidden_size 480 --zero_stage 0 --pp_size 1 --cluster " + own);
  CAPTURE(none);
  with_memory(std::stod(after(none, "try a cluster with ")));
  CHECK(refusal("--hidden_size 480 --zero_stage 0 --pp_size 1 --cluster " + own).empty());
  std::filesystem::remove(own);
}

TEST_CASE("sizes that the ranks do not have are answered with nodes that have them, or without") {
  const std::string stages = refusal("--pp_size 3");
  CHECK(stages ==
        "nodes=2: 4 ranks cannot be laid out with pp_size=3; try --nodes 3, or leave out "
        "--pp_size");
  CHECK(refusal("--pp_size 3 --nodes 3").empty());
  // Three nodes have the ranks, but samples of 16 tokens are not cut in three.
  const std::string heads = "--num_heads 3 --num_kv_heads 3 ";
  CHECK(refusal(heads + "--tp_size 3") ==
        "nodes=2: 4 ranks cannot be laid out with tp_size=3; leave out --tp_size");
  const std::string there = refusal(heads + "--tp_size 3 --nodes 3");
  CHECK(there.find("none of the 2 layouts of 6 ranks can be run (the first: ") == 0);
  CHECK(there.find("leave out --tp_size") != std::string::npos);
  CHECK(refusal(heads + "--nodes 3").empty());
}

TEST_CASE("a batch that no layout reaches is replaced by the nearest, and the answer says so") {
  const auto reached = [](const std::string& flags, int64_t samples, const std::string& why) {
    const Json json = found(flags);
    CAPTURE(flags, json["tokens"]);
    CHECK(json["tokens"] == 16 * samples);
    CHECK(json.contains("tokens_asked") == !why.empty());
    for (const Json& row : json["best"]) {
      const std::string layout = "--vocab_size 32 " + row["flags"].get<std::string>();
      CHECK(layout_of_flags(instead(kSmall, layout)).tokens_per_step() == 16 * samples);
    }
    const std::string text = search(layout_of_flags(instead(kSearch, flags))).text;
    CHECK(text.find(fmt::format("; {} tokens a step", 16 * samples)) != std::string::npos);
    CHECK((text.find("tokens are asked for, which") != std::string::npos) == !why.empty());
    CHECK(text.find(why) != std::string::npos);
  };
  reached("", 64, "");
  reached("--nodes 3", 66, "1024 tokens are asked for, which no layout of 6 ranks reaches; 66");
  reached("--dp_size 4 --micro_batch_size 3", 60, "no layout of 4 ranks reaches; 60 samples");
  reached("--plan 1030", 64, "1030 tokens are asked for, which are no whole number of samples; 64");
  reached("--nodes 6 --plan 80", 6, "no layout of 12 ranks reaches; 6 samples");  // all: 12
  CHECK(refusal("--plan 3").find("plan=3: the nearest batch that 4 ranks reach") == 0);
  CHECK(refusal("--plan 3").find("try 16") != std::string::npos);
  CHECK(refusal("--dp_size 4 --micro_batch_size 32").find("try 2048") != std::string::npos);
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
  refused("--require mfu>0.5", {"mfu>0.5", "mfu>=0.4"});
  refused("--require speed>=1", {"speed>=1", "tokens_per_s"});
  refused("--plan 0", {"needs a batch", "--plan"});
  check_throws<UsageError>([] { layout_of_flags("--nodes 2"); }, {"nodes", "--cluster"});
}

TEST_CASE("steps whose exchanges share links stand beside the others, and the longer are named") {
  Json one_node = slow_cluster({times("links.node.gbs", 0.3)});
  one_node["ranks_per_node"]["value"] = 4;
  for (const auto& [cluster, flags, some] :
       {std::tuple{one_node, "--nodes 1 --tp_size 2 --zero_stage 3", true},
        {slow_cluster(), "--dp_size 4", false}}) {
    const Json answer = tiny_answer(cluster, flags);
    const ClusterFile file(cluster);
    TrainConfig config = tiny_search(cluster, flags);
    config.search.cluster = file.path();
    const std::string text = search(config).text;
    CAPTURE(flags, text);
    int64_t number = 0, longer = 0;
    for (const Json& row : answer["best"]) {
      const double step = row["step_s"], shared = row["shared_s"];
      const std::string beside = fmt::format("{:>4}{:>10.3f}{:>10.3f}", ++number, step, shared);
      CHECK(text.find(beside) != std::string::npos);
      const bool is_longer = shared > 1.03 * step;
      longer += is_longer;
      const std::string by = fmt::format("number {} by {:.1f}%", number, 100 * (shared / step - 1));
      CHECK((text.find(by) != std::string::npos) == is_longer);
    }
    CHECK((text.find("share links and cores") != std::string::npos) == (longer > 0));
    CHECK((longer > 0) == some);  // or nothing is asked
  }
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
