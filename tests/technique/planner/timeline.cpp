#include "planner/timeline.h"

#include <nlohmann/json.hpp>

#include "technique/planner/layouts.h"

/// Timelines against the steps and programs that they are of.
namespace usp::test {
namespace {

using Json = nlohmann::json;

struct Drawn {
  std::vector<Program> programs;
  Replayed replayed;
  std::vector<std::vector<TimelineSlice>> slices;
  Json json;
  Cluster cluster;
};

Drawn drawn(const std::string& flags) {
  const TrainConfig config = layout_of_flags(instead(kSmall, flags));
  const RankClasses classes = classes_of_ranks(config, 2);
  Drawn found{.programs = record_classes(config, classes),
              .replayed = {},
              .slices = {},
              .json = {},
              .cluster = round_cluster(2)};
  Cost cost(found.cluster);
  found.replayed = replay(found.programs, classes, cost, &found.slices);
  found.json = Json::parse(timeline(found.programs, classes, cost));
  return found;
}

const char* const kDrawn[] = {"--dp_size 4 --zero_stage 3 --grad_acc_steps 2",
                              "--dp_size 2 --pp_size 2 --grad_acc_steps 4",
                              "--tp_size 2 --cp_size 2 --sequence_parallel"};

TEST_CASE("a timeline's slices follow one another and last as long as what they are of") {
  for (const char* flags : kDrawn) {
    CAPTURE(flags);
    const Drawn found = drawn(flags);
    Cost cost(found.cluster);
    for (size_t i = 0; i < found.programs.size(); ++i) {
      const Program& program = found.programs[i];
      double computes = 0, over = 0;
      int64_t ops = 0, sent = 0;
      for (const TimelineSlice& slice : found.slices[i]) {
        const Event& event = program.events[slice.event];
        if (slice.is_sent) {
          const Exchange& exchange = program.exchanges[event.what];
          const ProgramGroup& group = program.groups[exchange.group];
          CHECK(exchange.kind != CommKind::recv);
          CHECK(slice.end - slice.begin == Approx(cost.of(exchange, group).busy));
          ++sent;
          continue;
        }
        CHECK(slice.begin >= over);
        over = slice.end;
        if (event.kind != Event::compute) continue;
        computes += slice.end - slice.begin;
        ++ops;
      }
      CHECK(computes == Approx(found.replayed.classes[i].computes));
      CHECK(over <= found.replayed.classes[i].end);
      const auto is_kernel = [&](const Event& event) {
        return event.kind == Event::compute && cost.of(program.kernels[event.what]) > 0;
      };
      const auto is_sent = [&](const Event& event) {
        return event.kind == Event::post && program.exchanges[event.what].kind != CommKind::recv;
      };
      CHECK(ops == std::ranges::count_if(program.events, is_kernel));
      CHECK(sent == std::ranges::count_if(program.events, is_sent));
    }
  }
}

TEST_CASE("a timeline's file has a process for each class, with its passes, ops and exchanges") {
  for (const char* flags : kDrawn) {
    CAPTURE(flags);
    const Drawn found = drawn(flags);
    for (size_t i = 0; i < found.programs.size(); ++i) {
      const Program& program = found.programs[i];
      double computes = 0;
      int64_t sent = 0, first_passes = 0;
      for (const Json& event : found.json.at("traceEvents")) {
        if (event.at("ph") != "X" || event.at("pid") != program.rank) continue;
        CHECK(event.at("ts").get<double>() >= 0);
        CHECK(event.at("dur").get<double>() >= 0);
        const bool on_device = event.at("tid") == 0;
        CHECK(on_device == (event.at("cat") != "comm"));
        if (event.at("cat") == "op") computes += event.at("dur").get<double>();
        sent += event.at("cat") == "comm";
        first_passes += event.at("cat") == "phase" && event.at("name") == "F0";
      }
      CHECK(computes == Approx(1e6 * found.replayed.classes[i].computes));
      CHECK(sent == std::ranges::count(found.slices[i], true, &TimelineSlice::is_sent));
      CHECK(first_passes == 1);
    }
    CHECK(found.json.at("otherData").at("step_us").get<double>() ==
          Approx(1e6 * found.replayed.step));
  }
}

}  // namespace
}  // namespace usp::test
