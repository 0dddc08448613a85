#include "planner/segments.h"

#include "planner/schedule_replay.h"
#include "technique/planner/written.h"

/// Programs that are written out of recorded segments are those that a dry run records.
namespace usp::test {
namespace {

/// The layout, and where the rules accept them the two that differ from it by one flag.
std::vector<TrainConfig> with_twins(const std::string& flags) {
  const bool again = flags.find("--recompute full") != std::string::npos;
  const bool split = flags.find("--sequence_parallel") != std::string::npos;
  std::string other = flags;
  if (split) other.erase(other.find("--sequence_parallel"), 20);
  std::vector<TrainConfig> configs;
  for (const std::string& each :
       {flags, instead(flags, again ? "--recompute none" : "--recompute full"),
        split ? other : "--sequence_parallel " + flags}) {
    try {
      TrainConfig config;
      Args args("");
      read_without_advice(config, args, words_of_flags(each), /*ranks=*/0);
      configs.push_back(config);
    } catch (const UsageError&) {
    }
  }
  return configs;
}

/// Exchange without bytes on the wire, a rank's own in a communicator with ranks on several stages.
Exchange without_wire(Exchange of, const std::string& group) {
  if (group == "world") of.wire_bytes = of.net_bytes = 0;
  of.group = 0;
  return of;
}

/// The first event in which two programs differ; -1: none.
int64_t first_difference(const Program& a, const Program& b) {
  const auto group = [](const Program& of, const Event& event) {
    const ProgramGroup& own = of.groups[of.exchanges[event.what].group];
    return std::tuple(own.name, own.number, own.rank, *own.members);
  };
  const auto exchange = [](const Program& of, const Event& event) {
    const Exchange& own = of.exchanges[event.what];
    return without_wire(own, of.groups[own.group].name);
  };
  for (size_t i = 0; i < std::min(a.events.size(), b.events.size()); ++i) {
    const Event &x = a.events[i], &y = b.events[i];
    bool same =
        x.kind == y.kind && x.block == y.block && a.segments[x.segment] == b.segments[y.segment];
    if (same && x.kind == Event::compute) {
      same = a.kernels[x.what] == b.kernels[y.what];
    } else if (same && x.kind == Event::post) {
      same = exchange(a, x) == exchange(b, y) && group(a, x) == group(b, y);
    } else {
      same = same && x.what == y.what;
    }
    if (!same) return int64_t(i);
  }
  return a.events.size() == b.events.size() ? -1 : std::ssize(a.events);
}

TEST_CASE("programs written out of segments are those that are recorded, to the last event") {
  SegmentRecords records;
  int64_t layouts = 0;
  const int64_t enough = kSanitized                       ? 4
                         : is_carried("planner/segments") ? 20
                         : is_full()                      ? 300
                                                          : 100;
  for (const std::string& flags : random_layouts(static_cast<int>(enough), 23 + turn())) {
    if (layouts >= enough) break;
    for (TrainConfig config : with_twins(flags)) {
      ++layouts;
      const int64_t ranks_per_node = std::vector{1, 2, 4, 8}[layouts % 4];
      const Cluster cluster = uneven_cluster(ranks_per_node, layouts % 2 == 1);
      const RankClasses classes = classes_of_ranks(config, ranks_per_node);
      const int64_t p = config.pipeline.pp_size;
      for (int64_t micro_batches : {5 * p, 3 * p}) {
        config.grad_acc_steps = micro_batches;
        const std::vector<Program> written = records.programs(config, classes);
        const std::vector<Program> recorded = record_classes(config, classes);
        CAPTURE(flags, config.recompute, config.tensor_parallel.sequence_parallel, micro_batches);
        for (size_t i = 0; i < recorded.size(); ++i) {
          CAPTURE(recorded[i].rank);
          CHECK(first_difference(recorded[i], written[i]) == -1);
          CHECK(recorded[i].tail == written[i].tail);
          CHECK(recorded[i].posts == written[i].posts);
          CHECK(recorded[i].peak == written[i].peak);
          CHECK(recorded[i].memory == written[i].memory);
        }
        Cost cost(cluster);
        ScheduleReplay direct(recorded, classes), out_of(written, classes);
        direct.price(cost);
        out_of.price(cost);
        CHECK(direct.time().step == out_of.time().step);
        CHECK(direct.time().gradients == out_of.time().gradients);
      }
    }
  }
  CAPTURE(layouts, records.recorded(), records.written());
  CHECK(records.written() > 3 * layouts);  // or little has been compared
}

TEST_CASE("a long pipeline's late stages are recorded in few micro-batches") {
  const TrainConfig config = layout_of_flags(instead(
      kSmall, "--dp_size 2 --pp_size 8 --num_layers 30 --grad_acc_steps 24 --zero_stage 3"));
  const RankClasses classes = classes_of_ranks(config, /*ranks_per_node=*/2);
  SegmentRecords records;
  const std::vector<Program> written = records.programs(config, classes);
  CHECK(records.recorded() == std::ssize(written));
  CHECK(records.written() == std::ssize(written));  // or all micro-batches have been recorded
  std::vector<int64_t> micro_batches;
  for (const Program& program : written) {
    CHECK(first_difference(record(config, program.rank), program) == -1);
    micro_batches.push_back(Segments::micro_batches_to_record(config, program.rank));
  }
  CHECK(micro_batches == std::vector<int64_t>{11, 10, 9, 8, 7, 6, 5, 4});
}

}  // namespace
}  // namespace usp::test
