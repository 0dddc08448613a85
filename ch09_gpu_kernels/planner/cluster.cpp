#include "planner/cluster.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/check.h"
#include "base/json_reader.h"

namespace usp {

namespace {

constexpr std::array<std::string_view, 6> kOrigins = {"data sheet", "measured", "published",
                                                      "fitted",     "assumed",  "unknown"};

/// Reads an object of a file, and refuses what it does not know.
class ClusterReader {
 public:
  ClusterReader(const nlohmann::json& object, std::string file, std::string path)
      : object_(object), file_(std::move(file)), path_(std::move(path)) {
    if (!object_.is_object()) {
      usage_error("{}: {} must be an object {{...}}", file_, path_.empty() ? "it" : path_);
    }
  }

  const nlohmann::json& get(const std::string& key, std::string_view example) {
    known_.insert(key);
    const auto found = object_.find(key);
    if (found == object_.end()) {
      usage_error("{}: {} is missing; add {}", file_, full(key), example);
    }
    return *found;
  }

  std::string text(const std::string& key, std::string_view example) {
    const nlohmann::json& value = get(key, example);
    if (!value.is_string()) usage_error("{}: {} must be a text; try {}", file_, full(key), example);
    return value.get<std::string>();
  }

  bool has(const std::string& key) const { return object_.contains(key); }

  ClusterReader child(const std::string& key, std::string_view example) {
    return {get(key, example), file_, full(key)};
  }

  /// A number in [minimum, maximum].
  Sourced number(const std::string& key, double minimum, double maximum, double such_as) {
    const std::string example = fmt::format(
        "\"{}\": {{\"value\": {:g}, \"source\": \"assumed\", \"from\": \"...\"}}", key, such_as);
    ClusterReader of = child(key, example);
    const nlohmann::json& value = of.get("value", fmt::format("\"value\": {:g}", such_as));
    const double number = value.is_number() ? value.get<double>() : std::nan("");
    if (!(number >= minimum && number <= maximum)) {
      usage_error("{}: {} must be a number from {:g} to {:g}; try {:g}", file_, full(key), minimum,
                  maximum, such_as);
    }
    const std::string origin = of.text("source", "\"source\": \"data sheet\"");
    const auto* found = std::ranges::find(kOrigins, origin);
    if (found == kOrigins.end()) {
      usage_error("{}: {} has the source {}; try one of: {}", file_, full(key), in_quotes(origin),
                  fmt::join(kOrigins, ", "));
    }
    Sourced sourced{number, Origin(found - kOrigins.begin()), of.text("from", "\"from\": \"...\"")};
    of.end();
    return sourced;
  }

  /// Refuses what nobody has asked for.
  void end() const {
    for (const auto& [key, value] : object_.items()) {
      if (known_.contains(key)) continue;
      usage_error("{}: there is no {}; {} may have: {}", file_, in_quotes(full(key)),
                  path_.empty() ? "a cluster" : path_, fmt::join(known_, ", "));
    }
  }

  std::string full(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }
  std::vector<std::string> keys() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object_.items()) keys.push_back(key);
    return keys;
  }

 private:
  const nlohmann::json& object_;
  std::string file_, path_;
  std::set<std::string> known_;
};

ClusterLink read_link(ClusterReader& links, const std::string& name) {
  ClusterReader of =
      links.child(name, fmt::format("\"{}\": {{\"latency_us\": {{...}}, \"gbs\": {{...}}}}", name));
  ClusterLink link;
  link.latency_us = of.number("latency_us", 0, 1e6, 5);
  link.gbs = of.number("gbs", 1e-6, 1e6, 50);
  of.end();
  return link;
}

Framework read_framework(ClusterReader of) {
  Framework framework;
  framework.name = of.text("name", "\"name\": \"nanotron\"");
  framework.attention = of.text("attention", "\"attention\": \"blockwise\"");
  framework.recompute = of.text("recompute", "\"recompute\": \"none\"");
  framework.sequence_parallel = of.number("sequence_parallel", 0, 1, 1).value == 1;
  framework.matmul = of.number("matmul", 1e-3, 1, 0.7);
  framework.attention_share = of.number("attention_share", 1e-3, 1, 0.3);
  framework.half = of.number("half", 0, 1e6, 100);
  framework.launch_us = of.number("launch_us", 0, 1e6, 50);
  framework.net_latency_us = of.number("net_latency_us", 0, 1e6, 20);
  framework.net_gbs = of.number("net_gbs", 1e-6, 1e6, 40);
  framework.per_doubling = of.number("per_doubling", 0.1, 1, 0.8);
  framework.all_reduce = of.number("all_reduce", 1, 10, 1);
  framework.exposed = of.number("exposed", 0, 1, 0.5);
  framework.overlap = of.number("overlap", 0, 1, 0.5);
  framework.step_ms = of.number("step_ms", 0, 1e6, 1);
  framework.logit_bytes = of.number("logit_bytes", 0, 1000, 20);
  framework.gradient_bytes = of.number("gradient_bytes", 0, 16, 4);
  framework.kept_bytes = of.number("kept_bytes", 0, 1000, 16);
  framework.constant_gib = of.number("constant_gib", 0, 1000, 1);
  of.end();
  return framework;
}

Sourced whole(Sourced number, const std::string& file, const char* key) {
  if (number.value != std::floor(number.value)) {
    usage_error("{}: {} must be a whole number, not {:g}; try {:g}", file, key, number.value,
                std::floor(number.value));
  }
  return number;
}

}  // namespace

std::string_view name(Origin origin) { return kOrigins[size_t(origin)]; }

Cluster parse_cluster(const std::string& text, const std::string& file) {
  nlohmann::json json;
  try {
    json = parse_json(text, file);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  ClusterReader reader(json, file, "");
  Cluster cluster;
  cluster.name = reader.text("name", "\"name\": \"my_cluster\"");
  reader.text("about", "\"about\": \"...\"");
  const std::string computes = reader.text("computes", "\"computes\": \"accelerator\"");
  if (computes != "accelerator" && computes != "host") {
    usage_error("{}: computes must be accelerator or host, not {}; try \"accelerator\"", file,
                in_quotes(computes));
  }
  cluster.host_computes = computes == "host";
  cluster.ranks_per_node =
      whole(reader.number("ranks_per_node", 1, 1024, 8), file, "ranks_per_node");
  cluster.nics_per_node = whole(reader.number("nics_per_node", 1, 1024, 8), file, "nics_per_node");
  cluster.memory_gib = reader.number("memory_gib", 1e-6, 1e6, 75);
  ClusterReader peaks = reader.child("peak_tflops", "\"peak_tflops\": {\"bf16\": {...}}");
  for (const std::string& key : peaks.keys()) {
    if (key != "bf16" && key != "f32" && key != "f64") {
      usage_error("{}: there is no dtype {} in peak_tflops; try bf16, f32 or f64", file,
                  in_quotes(key));
    }
    cluster.peak_tflops[parse_dtype(key)] = peaks.number(key, 1e-6, 1e6, 900);
  }
  cluster.memory_gbs = reader.number("memory_gbs", 1e-3, 1e6, 3000);
  ClusterReader efficiency = reader.child("efficiency", "\"efficiency\": {\"matmul\": {...}}");
  cluster.matmul = efficiency.number("matmul", 1e-3, 1, 0.8);
  cluster.attention = efficiency.number("attention", 1e-3, 1, 0.5);
  cluster.memory = efficiency.number("memory", 1e-3, 1, 0.8);
  cluster.half_width = efficiency.number("half_width", 0, 1e6, 100);
  cluster.half_depth = efficiency.number("half_depth", 0, 1e6, 100);
  if (efficiency.has("beside")) cluster.beside = efficiency.number("beside", 1e-3, 1, 0.9);
  efficiency.end();
  cluster.launch_us = reader.number("launch_us", 0, 1e6, 4);
  ClusterReader links = reader.child("links", "\"links\": {\"node\": {...}, \"net\": {...}}");
  cluster.node = read_link(links, "node");
  cluster.net = read_link(links, "net");
  links.end();
  if (reader.has("price_per_gpu_hour")) {
    cluster.price = reader.number("price_per_gpu_hour", 0, 1e6, 2);
  }
  if (reader.has("framework")) {
    cluster.framework = read_framework(reader.child("framework", "\"framework\": {...}"));
  }
  reader.end();
  return cluster;
}

Cluster as_used(Cluster cluster) {
  if (!cluster.framework) return cluster;
  const Framework& framework = *cluster.framework;
  cluster.matmul = framework.matmul;
  cluster.attention = framework.attention_share;
  cluster.half_width = cluster.half_depth = framework.half;
  cluster.launch_us = framework.launch_us;
  cluster.net = {framework.net_latency_us, framework.net_gbs};
  cluster.per_doubling = framework.per_doubling;
  cluster.all_reduce = framework.all_reduce;
  return cluster;
}

std::string cluster_file(const std::string& name_or_file) {
  const bool is_file = name_or_file.find_first_of("/.") != std::string::npos;
  if (is_file) return name_or_file;
  return std::filesystem::path(USP_CLUSTERS) / (name_or_file + ".json");
}

Cluster read_cluster(const std::string& name_or_file, const std::string& flag) {
  namespace fs = std::filesystem;
  const fs::path shipped = USP_CLUSTERS, path = cluster_file(name_or_file);
  const bool is_file = path == name_or_file;
  std::ifstream file(path);
  if (!file || fs::is_directory(path)) {
    std::vector<std::string> names;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(shipped, none)) {
      if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
    }
    std::ranges::sort(names);
    usage_error("{}={}: there is no {}; try {}, or a file such as ./mine.json", flag, name_or_file,
                is_file ? "such file" : "cluster of this name", fmt::join(names, ", "));
  }
  std::stringstream text;
  text << file.rdbuf();
  return parse_cluster(text.str(), path.filename());
}

}  // namespace usp
