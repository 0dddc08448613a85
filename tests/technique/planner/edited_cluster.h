#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "planner/search.h"
#include "technique/planner/layouts.h"

/// Files of clusters with some numbers of a test's own, and small searches on them.
namespace usp::test {

using Json = nlohmann::json;
using Edit = std::function<void(Json&)>;

/// Multiplies a number of a cluster's file, such as "links.node.gbs".
inline Edit times(const std::string& path, double factor) {
  return [=](Json& json) {
    Json* at = &json;
    std::istringstream keys(path);
    for (std::string key; std::getline(keys, key, '.');) at = &at->at(key);
    at->at("value") = at->at("value").get<double>() * factor;
  };
}

/// Nodes of two ranks, slow enough that a tiny model's step depends on every number; edited.
inline Json slow_cluster(const std::vector<Edit>& edits = {}) {
  std::ifstream file(cluster_file("h100_nvl8"));
  Json json = Json::parse(file);
  json["ranks_per_node"]["value"] = 2;
  json["nics_per_node"]["value"] = 1;
  json["peak_tflops"]["bf16"]["value"] = 0.5;
  json["peak_tflops"]["f32"]["value"] = 0.4;
  json["memory_gbs"]["value"] = 10;
  json["launch_us"]["value"] = 12;
  json["links"]["node"]["latency_us"]["value"] = 20;
  json["links"]["net"]["latency_us"]["value"] = 40;
  json["links"]["node"]["gbs"]["value"] = 0.31;
  json["links"]["net"]["gbs"]["value"] = 0.17;
  json["memory_gib"]["value"] = 1;
  for (const Edit& edit : edits) edit(json);
  return json;
}

/// A cluster's file for the time of a test.
class ClusterFile {
 public:
  explicit ClusterFile(const Json& json) { std::ofstream(path()) << json; }
  ~ClusterFile() { std::filesystem::remove(path()); }
  ClusterFile(const ClusterFile&) = delete;
  ClusterFile& operator=(const ClusterFile&) = delete;

  std::string path() const {
    return std::filesystem::temp_directory_path() /
           fmt::format("usp_cluster_{}_{}.json", getpid(), fmt::ptr(this));
  }
};

/// A search for layouts of a tiny model, on two nodes unless the flags say otherwise.
inline TrainConfig tiny_search(const Json& cluster, const std::string& flags) {
  const ClusterFile file(cluster);
  constexpr const char* kTiny =
      "--nodes 2 --plan 1024 --seq_len 16 --hidden_size 24 --num_heads 4 --num_kv_heads 2 "
      "--ffn_hidden_size 36 --vocab_size 32 --num_layers 4 ";
  return layout_of_flags(instead(kTiny, flags + " --cluster " + file.path()));
}

/// Its answer.
inline Json tiny_answer(const Json& cluster, const std::string& flags) {
  const ClusterFile file(cluster);
  TrainConfig config = tiny_search(cluster, flags + " --plan_json");
  config.search.cluster = file.path();
  return Json::parse(search(config).text);
}

}  // namespace usp::test
