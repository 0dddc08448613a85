// A step of a layout as products of max-plus matrices: how many there are, what they say beside the
// formulas and the replay of every event, and the matrix of an action. --on names the cluster;
// --rates says how fast each of the three is, --step what one layout of many ranks takes; as --plan
// and --cluster ask for a search, --search says where its time goes, and --space how fast formulas
// go through all of its layouts.

#include <sys/resource.h>

#include <ctime>
#include <set>

#include "comm/launch.h"
#include "planner/candidates.h"
#include "planner/closed_form.h"
#include "planner/layout_search.h"
#include "planner/parts.h"
#include "planner/replay.h"
#include "planner/schedule_replay.h"
#include "planner/segments.h"
#include "run/command_line.h"
#include "tensor/console.h"

namespace usp {
namespace {

/// How often a core can do it in a second.
double rate(const std::function<void()>& done) {
  constexpr double kSeconds = 0.5;
  int64_t times = 0;
  double seconds = 0;
  const std::clock_t begin = std::clock();
  for (int64_t more = 1; seconds < kSeconds; more *= 2) {
    for (int64_t i = 0; i < more; ++i) done();
    times += more;
    seconds = double(std::clock() - begin) / CLOCKS_PER_SEC;
  }
  return double(times) / seconds;
}

void show(const std::string& what, double number) { print("{:<28}{:>16.9g}\n", what, number); }

/// Names of a class's clocks.
std::vector<std::string> clocks_of(const ActionProgram& folded) {
  std::vector<std::string> names = {"host", "device"};
  for (int32_t queue : folded.clock_queues) {
    const auto& [group, number, peer, sends] = folded.queues[queue];
    names.push_back(!sends ? group : fmt::format("to {} {}", group, peer));
  }
  return names;
}

/// The matrix of the action that is taken most often, of those of its kind, in ms.
void show_matrix(const ScheduleReplay& replay, char work) {
  const ActionProgram& folded = replay.folded(0);
  std::map<int32_t, int64_t> often;
  for (const ActionProgram::Turn& turn : folded.turns) {
    if (turn.work == work) ++often[turn.action];
  }
  if (often.empty()) return;
  const int32_t action =
      std::ranges::max_element(often, {}, [](const auto& entry) { return entry.second; })->first;
  const MaxPlus& matrix = replay.matrix(0, action);
  std::vector<std::string> rows = clocks_of(folded), columns = rows;
  for (int i = folded.clocks(); i < matrix.rows(); ++i) rows.emplace_back("leaves");
  for (int i = folded.clocks(); i < matrix.columns(); ++i) columns.emplace_back("comes");
  print("\n{} of rank 0, {} of {} times\n{:>12}", work, often[action],
        std::ranges::count(folded.turns, work, &ActionProgram::Turn::work), "ms");
  for (const std::string& column : columns) print("{:>12}", column);
  for (int i = 0; i < matrix.rows(); ++i) {
    print("\n{:>12}", rows[i]);
    for (double item : matrix.row(i)) {
      print("{:>12}", item == kNever ? "-" : fmt::format("{:.3f}", 1e3 * item));
    }
  }
  print("\n");
}

void show_sizes(const ScheduleReplay::Size& size, size_t classes) {
  show("classes of ranks", double(classes));
  show("events of a step", double(size.events));
  show("products of a step", double(size.products));
  show("matrices of blocks", double(size.blocks));
  show("matrices of actions", double(size.actions));
  show("clocks of a rank", double(size.clocks));
}

void show_rates(const TrainConfig& config, const std::vector<Program>& programs,
                const RankClasses& classes, ScheduleReplay& matrices, Cost& cost) {
  const ModelSize size(config);
  show("formulas a second", rate([&] { closed_form(config, cost.cluster(), size); }));
  show("products a second", rate([&] { matrices.time(); }));
  show("with new matrices a second", rate([&] {
         matrices.price(cost);
         matrices.time();
       }));
  show("replays of events a second", rate([&] { replay(programs, classes, cost); }));
  show("foldings a second", rate([&] { ScheduleReplay(programs, classes); }));
  show("records a second", rate([&] { record_classes(config, classes); }));
  show("records of segments a second", rate([&] { SegmentRecords().programs(config, classes); }));
  SegmentRecords known;
  known.programs(config, classes);
  show("written a second", rate([&] { known.programs(config, classes); }));
}

/// Seconds that a core spends on it.
double seconds_of(const std::function<void()>& done) {
  const std::clock_t begin = std::clock();
  done();
  return double(std::clock() - begin) / CLOCKS_PER_SEC;
}

double median(std::vector<double> numbers) {
  if (numbers.empty()) return 0;
  std::ranges::nth_element(numbers, numbers.begin() + std::ssize(numbers) / 2);
  return numbers[numbers.size() / 2];
}

/// Milliseconds from a layout to its step by products: of layouts that come after another of their
/// layer class, and of all of them where each is known.
void show_later(const LayoutSearch& search, const Cluster& cluster) {
  const auto node = static_cast<int64_t>(cluster.ranks_per_node.value);
  SegmentRecords records;
  std::set<std::string> classes;
  std::vector<double> later, known;
  for (std::vector<double>* times : {&later, &known}) {
    for (const Timed& timed : search.timed()) {
      const double seconds =
          seconds_of([&] { RecordedStep(timed.candidate, node, records).fold().seconds(cluster); });
      const bool is_first = classes.insert(layer_class_key(timed.candidate.config)).second;
      if (!is_first) times->push_back(1e3 * seconds);
    }
  }
  show("layouts after their first", double(later.size()));
  show("ms of such a layout", median(later));
  show("ms of a layout once more", median(known));
}

/// Where the time of a search goes: memory and formulas of all layouts; of those that it lays out
/// in time, dry runs, by whole steps and by segments, folding, and replays.
void show_search(const TrainConfig& config, const Cluster& cluster) {
  const auto node = static_cast<int64_t>(cluster.ranks_per_node.value);
  LayoutSearch search(config, cluster);
  const double all = seconds_of([&] { search.run(); });
  Candidates found;
  const double sorts = seconds_of([&] { found = make_candidates(config, cluster); });
  double whole = 0, segments = 0, folds = 0, replays = 0;
  int64_t recorded = 0, written = 0;
  for (const Timed& timed : search.timed()) {
    TrainConfig layout = timed.candidate.config;
    SegmentRecords records;
    std::optional<RecordedStep> step;
    segments += seconds_of([&] { step.emplace(timed.candidate, node, records); });
    folds += seconds_of([&] { step->fold(); });
    replays += seconds_of([&] { step->time(cluster); });
    recorded += records.recorded();
    written += records.written();
    const int64_t m = layout.grad_acc_steps, few = steady_micro_batches(layout);
    const int64_t more = few + layout.pipeline.pp_size;
    for (int64_t count : m > more ? std::vector{few, more} : std::vector{m}) {
      layout.grad_acc_steps = count;
      whole += seconds_of([&] { record_classes(layout, timed.classes); });
    }
  }
  show("layouts", double(found.fit.size() + found.too_large.size()));
  show("layouts in time", double(search.replayed()));
  show("seconds of the search", all);
  show("seconds of memory", sorts);
  show("seconds of whole dry runs", whole);
  show("seconds of segments", segments);
  show("seconds of folding", folds);
  show("seconds of replays", replays);
  show("programs recorded", double(recorded));
  show("programs written", double(written));
  show_later(search, cluster);
}

/// What one layout of many ranks takes, from its flags to its step, and at how much memory.
void show_step(const TrainConfig& config, const Cluster& cluster) {
  const auto node = static_cast<int64_t>(cluster.ranks_per_node.value);
  std::optional<RankClasses> classes;
  const double looks = seconds_of([&] { classes = classes_of_ranks(config, node); });
  SegmentRecords records;
  const Candidate candidate{config, 0, 0, "", 0};
  std::optional<RecordedStep> step;
  const double writes = seconds_of([&] { step.emplace(candidate, node, records); });
  const double replays = 1 / rate([&] { step->time(cluster); });
  std::optional<FoldedStep> folded;
  const double folds = seconds_of([&] { folded = step->fold(); });
  show("ranks", double(config.mesh().ranks()));
  show("classes of ranks", double(classes->ranks.size()));
  show("seconds of the step", step->time(cluster).replayed.step);
  show("seconds of classes", looks);
  show("seconds of the record", writes - looks);
  show("seconds of a replay", replays);
  show("seconds of folding", folds);
  show("seconds of products", 1 / rate([&] { folded->seconds(cluster); }));
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  show("GB", 1024.0 * double(usage.ru_maxrss) / 1e9);
}

/// How fast memory and formulas go through all layouts of a search.
void show_space(const TrainConfig& config, const Cluster& cluster) {
  Candidates found;
  const double counts = seconds_of([&] { found = make_candidates(config, cluster); });
  const ModelSize size(config);
  const auto all = double(found.fit.size() + found.too_large.size());
  const double passes = rate([&] {
    for (const auto* layouts : {&found.fit, &found.too_large}) {
      for (const Candidate& each : *layouts) closed_form(each.config, cluster, size);
    }
  });
  show("layouts", all);
  show("layouts that fit", double(found.fit.size()));
  show("formulas a second", all * passes);
  show("with memory a second", all / counts);
}

/// Takes a word out of a command line, with so many behind it: the last of them; empty without it.
std::string take(std::vector<std::string>& words, const std::string& flag, int64_t behind) {
  const auto found = std::ranges::find(words, flag);
  if (found == words.end()) return "";
  if (words.end() - found <= behind) usage_error("{} needs a cluster; try {} a100", flag, flag);
  std::string value = *(found + behind);
  words.erase(found, found + behind + 1);
  return value;
}

int run(const Communicator&, int argc, char** argv) {
  std::vector<std::string> words(argv, argv + argc);
  const std::string on = take(words, "--on", 1);
  const bool rates = !take(words, "--rates", 0).empty();
  const bool searches = !take(words, "--search", 0).empty();
  const bool steps = !take(words, "--step", 0).empty();
  const bool space = !take(words, "--space", 0).empty();
  TrainConfig config;
  Args args("");
  if (!read_command_line(config, args, words, /*ranks=*/0)) return 0;
  if (searches) return show_search(config, read_cluster(config.search.cluster)), 0;
  if (space) return show_space(config, read_cluster(config.search.cluster)), 0;
  const Cluster cluster = read_cluster(on.empty() ? "h100_nvl8" : on, "on");
  if (steps) return show_step(config, cluster), 0;
  Cost cost(cluster);
  const RankClasses classes =
      classes_of_ranks(config, static_cast<int64_t>(cluster.ranks_per_node.value));
  const std::vector<Program> programs = record_classes(config, classes);
  ScheduleReplay matrices(programs, classes);
  print("{} on {}\n", layout_flags(config), cluster.name);
  show_sizes(matrices.size(), classes.ranks.size());

  matrices.price(cost);
  const double by_events = replay(programs, classes, cost).step, step = matrices.time().step;
  show("seconds by formulas", closed_form(config, cluster).step());
  show("seconds by products", step);
  show("seconds by events", by_events);
  std::set<std::string> dimensions;
  for (const ProgramGroup& group : programs[0].groups) dimensions.insert(dimension_of(group.name));
  for (const std::string& dimension : dimensions) {
    matrices.price(cost, dimension);
    show(fmt::format("seconds if {} took none", dimension), matrices.time().step);
  }
  matrices.price(cost);
  if (rates) show_rates(config, programs, classes, matrices, cost);
  for (char work : {'F', 'B'}) show_matrix(matrices, work);
  return 0;
}

}  // namespace
}  // namespace usp

int main(int argc, char** argv) { return usp::run_alone_main(usp::run, argc, argv); }
