#include "planner/change.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/check.h"

namespace usp {

namespace {

/// All of a text as a number; NaN where it is none.
double number_of(const std::string& text) {
  std::istringstream stream(text);
  double value = std::nan("");
  if (text.empty() || std::isspace(text[0]) || !(stream >> value) || !stream.eof()) {
    return std::nan("");
  }
  return value;
}

[[noreturn]] void refuse_change(const std::string& text, const std::string& part) {
  usage_error(
      "what_if={}: {} must be one of {} with a percentage, gpu with a cluster, or ranks with so "
      "many more or fewer; try net=+100%, gpu=a100 or ranks=-8",
      text, part.empty() ? "an empty part" : part, fmt::join(kChangeable, ", "));
}

Change parse_change(const std::string& text, const std::string& part) {
  const size_t at = part.find('=');
  if (at == std::string::npos || at + 1 == part.size()) refuse_change(text, part);
  Change change{.key = part.substr(0, at), .gpu = ""};
  std::string value = part.substr(at + 1);
  if (change.key == "gpu") {
    change.gpu = value;
    return change;
  }
  const bool has_sign = value[0] == '+' || value[0] == '-';
  if (change.key == "ranks") {
    const double ranks = has_sign ? number_of(value) : std::nan("");
    if (std::isnan(ranks) || ranks != std::floor(ranks) || ranks == 0 || std::abs(ranks) > 1 << 20)
      refuse_change(text, part);
    change.ranks = static_cast<int64_t>(ranks);
    return change;
  }
  if (std::ranges::find(kChangeable, change.key) == kChangeable.end() || value.back() != '%') {
    refuse_change(text, part);
  }
  value.pop_back();
  const double percent = has_sign ? number_of(value) : std::nan("");
  if (!(percent > -100 && percent <= 1e6)) refuse_change(text, part);
  change.factor = 1 + percent / 100;
  return change;
}

}  // namespace

std::vector<Change> parse_changes(const std::string& text) {
  std::vector<Change> changes;
  std::stringstream stream(text + ",");
  for (std::string part; std::getline(stream, part, ',');) {
    changes.push_back(parse_change(text, part));
    const auto same = [&](const Change& other) { return other.key == changes.back().key; };
    if (std::ranges::count_if(changes, same) > 1) {
      usage_error("what_if={}: {} changes twice; leave out one of the two", text,
                  changes.back().key);
    }
  }
  return changes;
}

// [changed]
Cluster changed(Cluster cluster, const std::string& key, double factor) {
  const auto times = [&](Sourced& number) {
    number = {number.value * factor, Origin::assumed, "a change"};
  };
  if (key == "peak") {
    for (auto& [dtype, peak] : cluster.peak_tflops) times(peak);
  } else if (key == "bandwidth") {
    times(cluster.memory_gbs);
  } else if (key == "node") {
    times(cluster.node.gbs);
  } else if (key == "net") {
    times(cluster.net.gbs);
  } else if (key == "latency") {
    times(cluster.node.latency_us);
    times(cluster.net.latency_us);
  } else if (key == "launch") {
    times(cluster.launch_us);
  } else {
    times(cluster.memory_gib);
  }
  return cluster;
}
// [changed]

Cluster with_cards(Cluster cluster, const Cluster& of) {
  cluster.name += " with the cards of " + of.name;
  cluster.host_computes = of.host_computes;
  cluster.memory_gib = of.memory_gib;
  cluster.peak_tflops = of.peak_tflops;
  cluster.memory_gbs = of.memory_gbs;
  cluster.matmul = of.matmul;
  cluster.attention = of.attention;
  cluster.memory = of.memory;
  cluster.half_width = of.half_width;
  cluster.half_depth = of.half_depth;
  cluster.launch_us = of.launch_us;
  cluster.node = of.node;
  return cluster;
}

}  // namespace usp
