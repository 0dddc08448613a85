#include "planner/cluster.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "testing.h"

/// Files of clusters, good and bad.
namespace usp::test {
namespace {

using Json = nlohmann::json;

Json good_cluster() {
  const auto is = [](double value) {
    return Json{{"value", value}, {"source", "assumed"}, {"from", "a test"}};
  };
  const Json link = {{"latency_us", is(2)}, {"gbs", is(30)}};
  return {{"name", "mine"},
          {"about", "a test's"},
          {"computes", "accelerator"},
          {"ranks_per_node", is(4)},
          {"nics_per_node", is(2)},
          {"memory_gib", is(40)},
          {"peak_tflops", {{"bf16", is(300)}}},
          {"memory_gbs", is(2000)},
          {"efficiency",
           {{"matmul", is(0.7)},
            {"attention", is(0.5)},
            {"memory", is(0.9)},
            {"half_width", is(64)},
            {"half_depth", is(32)}}},
          {"launch_us", is(5)},
          {"links", {{"node", link}, {"net", link}}}};
}

TEST_CASE("a cluster's file is read with every number and its source") {
  Json json = good_cluster();
  json["memory_gbs"]["source"] = "data sheet";
  const Cluster cluster = parse_cluster(json.dump(), "mine.json");
  CHECK(cluster.name == "mine");
  CHECK(!cluster.host_computes);
  CHECK(cluster.ranks_per_node.value == 4);
  CHECK(cluster.nics_per_node.value == 2);
  CHECK(cluster.peak_tflops.at(DType::bf16).value == 300);
  CHECK(cluster.memory_gbs.origin == Origin::data_sheet);
  CHECK(cluster.memory_gbs.from == "a test");
  CHECK(cluster.half_width.value == 64);
  CHECK(cluster.half_depth.value == 32);
  CHECK(cluster.net.gbs.value == 30);
  CHECK(cluster.net.latency_us.value == 2);
}

TEST_CASE("a bad cluster is refused with the file, the key and what would do") {
  const auto refused = [](auto change, const std::vector<std::string>& parts) {
    Json json = good_cluster();
    change(json);
    std::vector<std::string> all = {"mine.json"};
    all.insert(all.end(), parts.begin(), parts.end());
    check_throws<UsageError>([&] { parse_cluster(json.dump(), "mine.json"); }, all);
  };
  refused([](Json& json) { json["links"].erase("net"); }, {"links.net is missing", "\"net\""});
  refused([](Json& json) { json["links"]["net"].erase("gbs"); }, {"links.net.gbs is missing"});
  refused([](Json& json) { json["speed"] = 1; }, {"there is no \"speed\"", "memory_gbs"});
  refused([](Json& json) { json["links"]["rack"] = 1; }, {"links.rack", "node"});
  refused([](Json& json) { json["peak_tflops"]["f8"] = 1; }, {"f8", "bf16"});
  refused([](Json& json) { json["ranks_per_node"]["value"] = 2.5; }, {"whole", "2.5", "try 2"});
  refused([](Json& json) { json["efficiency"]["matmul"]["value"] = 1.5; },
          {"efficiency.matmul", "from 0.001 to 1", "try 0.8"});
  refused([](Json& json) { json["launch_us"]["value"] = "5"; }, {"launch_us", "number"});
  refused([](Json& json) { json["launch_us"]["source"] = "hearsay"; },
          {"launch_us", "hearsay", "data sheet"});
  refused([](Json& json) { json["launch_us"].erase("from"); }, {"launch_us.from is missing"});
  refused([](Json& json) { json["launch_us"] = 5; }, {"launch_us must be an object"});
  refused([](Json& json) { json["computes"] = "both"; }, {"computes", "accelerator or host"});
  check_throws<UsageError>([] { parse_cluster("{", "mine.json"); }, {"mine.json"});
  check_throws<UsageError>([] { read_cluster("h300"); }, {"cluster=h300", "h100_nvl8"});
  check_throws<UsageError>([] { read_cluster("./no.json"); }, {"no such file"});
}

TEST_CASE("the clusters that are shipped can be read, and a name is its file's") {
  size_t read = 0;
  namespace fs = std::filesystem;
  for (const auto& entry : fs::directory_iterator(fs::path(cluster_file("a100")).parent_path())) {
    CHECK(read_cluster(entry.path().stem()).name == entry.path().stem());
    ++read;
  }
  CHECK(read >= 8);
}

}  // namespace
}  // namespace usp::test
