// Lays a recorded run out in time, by the simulator of the planner. Reads from standard input what
// tools/run/simulation.py has made of a trace, a program for each rank, and writes to standard
// output when each did what. Times are microseconds.

#include <iostream>
#include <nlohmann/json.hpp>

#include "base/output.h"
#include "planner/shared_replay.h"

namespace usp {
namespace {

using Json = nlohmann::json;

/// What is sent, what is received, and anything else: all collectives are alike but for their
/// seconds.
CommKind kind_of(const std::string& name) {
  return name == "send" ? CommKind::send : name == "recv" ? CommKind::recv : CommKind::barrier;
}

// [read]
/// A rank's program, and what its events take.
void read(const Json& json, int rank, Program& program, ProgramSeconds& seconds) {
  program.rank = rank;
  for (const Json& group : json.at("groups")) {
    auto members = group.at("members").get<std::vector<int>>();
    program.groups.push_back({group.at("name").get<std::string>(),
                              group.at("number").get<int64_t>(), group.at("rank").get<int>(),
                              std::make_shared<const std::vector<int>>(std::move(members))});
  }
  for (const Json& exchange : json.at("exchanges")) {
    program.exchanges.push_back({.group = exchange.at("group").get<int>(),
                                 .kind = kind_of(exchange.at("kind").get<std::string>()),
                                 .peer = exchange.at("peer").get<int>()});
    const double busy = exchange.at("busy"), latency = exchange.at("latency");
    seconds.exchanges.push_back({.busy = busy, .arrives = busy + latency, .latency = latency});
    seconds.keeps.push_back(exchange.at("keeps").get<uint8_t>());
  }
  for (const Json& event : json.at("events")) {
    if (event.is_array()) {  // ["post", exchange] or ["wait", number that was posted]
      const bool posts = event.at(0) == "post";
      const auto what = event.at(1).get<int32_t>();
      program.events.push_back({posts ? Event::post : Event::wait, what, 0, -1});
    } else {
      const auto kernel = static_cast<int32_t>(seconds.kernels.size());
      program.events.push_back({Event::compute, kernel, 0, -1});
      seconds.kernels.push_back(event.get<double>());
    }
  }
}
// [read]

/// [begin, end] of each; null for what did not come.
Json to_json(const std::vector<RecordedRank::Span>& spans) {
  Json json = Json::array();
  for (const RecordedRank::Span& span : spans) json.push_back({span.begin, span.end});
  return json;
}

int run(int, char**) {
  const Json json = Json::parse(std::cin);
  std::vector<Program> programs(json.at("ranks").size());
  std::vector<ProgramSeconds> seconds(programs.size());
  for (size_t i = 0; i < programs.size(); ++i) {
    read(json["ranks"][i], static_cast<int>(i), programs[i], seconds[i]);
  }
  Sharing sharing{.links = Sharing::in_turns};
  if (!json.at("cores").is_null()) sharing.cores = json["cores"].get<double>();
  const RecordedRun found = replay_recorded(programs, seconds, sharing);
  Json answer{{"ranks", Json::array()}, {"speeds", Json::array()}};
  for (const RecordedRank& rank : found.ranks) {
    answer["ranks"].push_back({{"posts", rank.posts},
                               {"exchanges", to_json(rank.exchanges)},
                               {"waits", to_json(rank.waits)},
                               {"end", rank.end}});
  }
  for (const auto& [from, share] : found.speeds) answer["speeds"].push_back({from, share});
  write_output(answer.dump());
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_main(usp::run, argc, argv); }
