#include "planner/fit.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/check.h"
#include "base/file_writer.h"
#include "planner/rows.h"

namespace usp {

namespace {

constexpr int kFolds = 5;
constexpr double kFinest = 2e-3;     ///< the step of a knob, in parts, at which a fit ends
constexpr double kSoftMemory = 0.1;  ///< the scale of soft() for GiB

std::string file_name(const std::string& path) { return std::filesystem::path(path).filename(); }

/// Rows of some files, each with its part of the whole.
struct FitRows {
  std::vector<RunRow> rows;     ///< whose steps are fitted
  std::vector<RunRow> memory;   ///< that say what they took, or that they did not run
  std::vector<double> weights;  ///< each file has as much as the others
  std::vector<int> file;
  std::vector<std::string> files;
  int64_t left_out = 0;
};

/// "pp<=1": whether a row is as asked for.
bool is_as_asked(const RunRow& row, const std::string& condition, double ranks_per_node) {
  const size_t at = condition.find("<=");
  const std::string what = condition.substr(0, at);
  const MeshSizes mesh = row.config.mesh();
  const std::map<std::string, double> values = {
      {"tp", double(mesh.tp)},
      {"pp", double(mesh.pp)},
      {"dp", double(mesh.dp)},
      {"nodes", std::ceil(double(mesh.ranks()) / ranks_per_node)}};
  const auto found = values.find(what);
  double most = 0;
  const char* const end = condition.data() + condition.size();
  const char* const from = at == std::string::npos ? end : condition.data() + at + 2;
  const auto [to, error] = std::from_chars(from, end, most);
  if (found == values.end() || error != std::errc() || to != end) {
    usage_error("plan_fit={}: it must be tp, pp, dp or nodes with <= and a number; try \"pp<=1\"",
                condition);
  }
  return found->second <= most;
}

FitRows read_fit_rows(const TrainConfig& config, const Cluster& cluster) {
  FitRows all;
  all.files = split_files("plan_rows", config.search.plan_rows);
  for (size_t i = 0; i < all.files.size(); ++i) {
    const Table table = read_table(all.files[i], row_columns());
    const size_t before = all.rows.size();
    for (RunRow& row : read_rows(table, config, cluster)) {
      if (row.mem_gb > 0 || row.failed) all.memory.push_back(row);
      bool asked = row.step_s > 0 && row.by_framework;
      for (const std::string& condition : split_list(config.search.plan_fit)) {
        if (condition == "all") continue;
        asked = asked && is_as_asked(row, condition, cluster.ranks_per_node.value);
      }
      if (asked) all.rows.push_back(std::move(row));
    }
    const size_t count = all.rows.size() - before;
    all.left_out += std::ssize(table.rows) - int64_t(count);
    all.weights.resize(all.rows.size(), 1 / double(std::max<size_t>(1, count)));
    all.file.resize(all.rows.size(), int(i));
  }
  if (all.rows.size() < kFolds) {
    usage_error("plan_fit={}: {} has {} such rows with a measured step; try --plan_fit all",
                config.search.plan_fit, config.search.plan_rows, all.rows.size());
  }
  return all;
}

/// Seconds of each row on a cluster. Rows of a class share its parts.
class FitSteps {
 public:
  explicit FitSteps(const FitRows& all) : all_(all) {
    for (const RunRow& row : all.rows) class_.push_back(&predictor_.layer_class(row));
  }

  std::vector<double> on(const Cluster& cluster) const {
    const Cluster used = as_used(cluster);
    Cost cost(used);
    std::map<const LayerClass*, PartSeconds> parts;
    std::vector<double> seconds;
    for (size_t i = 0; i < all_.rows.size(); ++i) {
      const auto [found, is_new] = parts.try_emplace(class_[i]);
      if (is_new) found->second = part_seconds(*class_[i], cost);
      seconds.push_back(step_of_parts(all_.rows[i].config, found->second, cost).step());
    }
    return seconds;
  }

  /// Error over the rows that are not in a fold.
  double error(const Cluster& cluster, int fold) const {
    const std::vector<double> seconds = on(cluster);
    double sum = 0;
    for (size_t i = 0; i < seconds.size(); ++i) {
      if (int(i % kFolds) == fold) continue;
      sum += all_.weights[i] * soft(seconds[i], all_.rows[i].step_s);
    }
    return sum;
  }

 private:
  const FitRows& all_;
  RowPredictor predictor_;
  std::vector<const LayerClass*> class_;
};

/// Runs that are judged by their memory.
struct Fits {
  int64_t ran = 0, accepted = 0, failed = 0, refused = 0;

  Fits& operator+=(const Fits& other) {
    ran += other.ran, accepted += other.accepted;
    failed += other.failed, refused += other.refused;
    return *this;
  }
  double accepts() const { return 100 * double(accepted) / double(std::max<int64_t>(1, ran)); }
  double refuses() const { return 100 * double(refused) / double(std::max<int64_t>(1, failed)); }
};

/// Fits of a fold's rows; of all where it is -1.
Fits fits_of(const FitRows& all, const Cluster& cluster, int fold) {
  Fits count;
  for (size_t i = 0; i < all.memory.size(); ++i) {
    if (fold >= 0 && int(i % kFolds) != fold) continue;
    const RunRow& row = all.memory[i];
    const bool fits = gib_of_row(row, cluster) <= cluster.memory_gib.value;
    ++(row.failed ? count.failed : count.ran);
    if (row.failed != fits) ++(row.failed ? count.refused : count.accepted);
  }
  return count;
}

/// What bytes are off by, without a fold; a layout refused that ran counts as much as five accepted
/// that did not.
double memory_error(const FitRows& all, const Cluster& cluster, int fold) {
  double sum = 0, rows = 0, wrong = 0;
  for (size_t i = 0; i < all.memory.size(); ++i) {
    if (int(i % kFolds) == fold) continue;
    const RunRow& row = all.memory[i];
    const double gib = gib_of_row(row, cluster);
    const bool fits = gib <= cluster.memory_gib.value;
    if (row.failed == fits) wrong += row.failed ? 1 : 5;
    if (row.mem_gb > 0) sum += soft(gib, row.mem_gb, kSoftMemory), ++rows;
  }
  return sum / std::max(1.0, rows) + 10 * wrong / double(all.memory.size());
}

std::vector<double> mean_by_file(const FitRows& all, const std::vector<double>& off) {
  std::vector<double> sums(all.files.size());
  for (size_t i = 0; i < off.size(); ++i) sums[all.file[i]] += all.weights[i] * off[i];
  return sums;
}

std::vector<double> off_by(const FitRows& all, const std::vector<double>& seconds) {
  std::vector<double> off;
  for (size_t i = 0; i < seconds.size(); ++i) {
    off.push_back(100 * std::abs(seconds[i] / all.rows[i].step_s - 1));
  }
  return off;
}

void write_fitted(const Cluster& cluster, const std::vector<Knob>& knobs, const TrainConfig& config,
                  const std::string& from) {
  std::ifstream file(cluster_file(config.search.cluster));
  auto json = nlohmann::ordered_json::parse(file);
  Cluster copy = cluster;
  for (const Knob& knob : knobs) {
    auto& entry = json[nlohmann::ordered_json::json_pointer("/framework/" + knob.name)];
    entry["value"] = std::stod(fmt::format("{:.4g}", knob.of(copy).value));
    entry["source"] = "fitted";
    entry["from"] = from;
  }
  write_file(config.search.plan_out, json.dump(2) + "\n");
}

Knob of_framework(const char* name, double minimum, double maximum, double start,
                  Sourced Framework::*member) {
  return {name, minimum, maximum, start,
          [member](Cluster& cluster) -> Sourced& { return (*cluster.framework).*member; }};
}

}  // namespace

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<std::string> split_files(const char* flag, const std::string& text) {
  const std::vector<std::string> files = split_list(text);
  for (auto file = files.begin(); file != files.end(); ++file) {
    std::error_code error;
    const bool twice = std::any_of(files.begin(), file, [&](const std::string& before) {
      return before == *file || std::filesystem::equivalent(before, *file, error);
    });
    if (twice) usage_error("{}={}: {} is there twice; leave one of the two out", flag, text, *file);
  }
  return files;
}

double soft(double predicted, double measured, double scale) {
  const double off = std::log(predicted / measured) / scale;
  return std::sqrt(1 + off * off) - 1;
}

// [knobs]
std::vector<Knob> step_knobs(bool gathers) {
  std::vector<Knob> knobs = {
      of_framework("matmul", 0.1, 1, 0.7, &Framework::matmul),
      of_framework("attention_share", 0.02, 1, 0.1, &Framework::attention_share),
      of_framework("half", 1, 1000, 10, &Framework::half),
      of_framework("launch_us", 0.5, 200, 50, &Framework::launch_us),
      of_framework("net_latency_us", 0.5, 50, 20, &Framework::net_latency_us),
      of_framework("net_gbs", 1, 50, 20, &Framework::net_gbs),
      of_framework("per_doubling", 0.3, 1, 0.8, &Framework::per_doubling),
      of_framework("exposed", 0.01, 1, 0.5, &Framework::exposed),
      of_framework("overlap", 0.01, 1, 0.3, &Framework::overlap),
      of_framework("step_ms", 0.01, 2000, 5, &Framework::step_ms),
      of_framework("logit_bytes", 1, 200, 20, &Framework::logit_bytes)};
  if (gathers) knobs.push_back(of_framework("all_reduce", 1, 3, 1.5, &Framework::all_reduce));
  return knobs;
}

std::vector<Knob> memory_knobs() {
  return {of_framework("kept_bytes", 1, 200, 16, &Framework::kept_bytes),
          of_framework("constant_gib", 0.01, 20, 1, &Framework::constant_gib)};
}
// [knobs]

Cluster begin_at(Cluster cluster, const std::vector<Knob>& knobs) {
  for (const Knob& knob : knobs) knob.of(cluster).value = knob.start;
  return cluster;
}

// [fit]
Cluster fit(Cluster cluster, const std::vector<Knob>& knobs,
            const std::function<double(const Cluster&)>& error) {
  double least = error(cluster);
  std::vector<double> steps(knobs.size(), 0.25);
  while (std::ranges::max(steps) > kFinest) {
    const Cluster before = cluster;
    for (size_t i = 0; i < knobs.size(); ++i) {
      bool helps = false;
      for (double factor : {1 + steps[i], 1 / (1 + steps[i])}) {
        Cluster tried = cluster;
        double& value = knobs[i].of(tried).value;
        value = std::clamp(value * factor, knobs[i].minimum, knobs[i].maximum);
        const double now = error(tried);
        if (now >= least - 1e-12) continue;
        least = now, cluster = tried, helps = true;
        break;
      }
      steps[i] *= helps ? 1.2 : 0.6;
    }
    Cluster on = cluster;  // once more as far as this round has come
    Cluster from = before;
    for (const Knob& knob : knobs) {
      double& value = knob.of(on).value;
      value = std::clamp(value * value / knob.of(from).value, knob.minimum, knob.maximum);
    }
    const double now = error(on);
    if (now < least - 1e-12) least = now, cluster = on;
  }
  return cluster;
}
// [fit]

namespace {

/// The errors of steps, in per cent: of a fit to all rows, and where each was left out of one.
std::string describe_steps(const FitRows& all, const FitSteps& steps, const Cluster& fitted,
                           const std::vector<Cluster>& folds) {
  std::vector<double> blind(all.rows.size());
  for (int fold = 0; fold < kFolds; ++fold) {
    const std::vector<double> off = off_by(all, steps.on(folds[fold]));
    for (size_t i = fold; i < off.size(); i += kFolds) blind[i] = off[i];
  }
  const std::vector<double> seen = mean_by_file(all, off_by(all, steps.on(fitted)));
  const std::vector<double> unseen = mean_by_file(all, blind);
  std::string text =
      fmt::format("{} rows fitted, {} left out of the fit\n", all.rows.size(), all.left_out);
  for (size_t i = 0; i < all.files.size(); ++i) {
    text += fmt::format("   {}: off by {:.2f} % as fitted, {:.2f} % where left out\n",
                        file_name(all.files[i]), seen[i], unseen[i]);
  }
  return text;
}

std::string describe_memory(const FitRows& all, const Cluster& fitted,
                            const std::vector<Cluster>& folds) {
  Fits seen = fits_of(all, fitted, -1), unseen;
  for (int fold = 0; fold < kFolds; ++fold) unseen += fits_of(all, folds[fold], fold);
  return fmt::format(
      "{} rows of memory: accepts {:.1f} % of those that ran and refuses {:.1f} % of the others as "
      "fitted, {:.1f} % and {:.1f} % where left out\n",
      all.memory.size(), seen.accepts(), seen.refuses(), unseen.accepts(), unseen.refuses());
}

}  // namespace

std::string fit_rows(const TrainConfig& config) {
  const Cluster start = read_cluster(config.search.cluster);
  if (!start.framework) {
    usage_error("cluster={}: a fit needs a \"framework\" in its file; try --cluster a100",
                config.search.cluster);
  }
  const FitRows all = read_fit_rows(config, start);
  const FitSteps steps(all);
  const bool gathers = std::ranges::any_of(
      all.rows, [](const RunRow& row) { return row.config.data_parallel.zero_stage > 0; });
  std::vector<Knob> knobs = step_knobs(gathers);
  const std::vector<Knob> of_memory = all.memory.empty() ? std::vector<Knob>{} : memory_knobs();
  const auto fit_without = [&](int fold) {
    Cluster found = fit(begin_at(start, knobs), knobs,
                        [&](const Cluster& tried) { return steps.error(tried, fold); });
    if (of_memory.empty()) return found;
    return fit(begin_at(found, of_memory), of_memory,
               [&](const Cluster& tried) { return memory_error(all, tried, fold); });
  };
  const Cluster fitted = fit_without(-1);
  std::vector<Cluster> folds;
  for (int fold = 0; fold < kFolds; ++fold) folds.push_back(fit_without(fold));
  std::string text = describe_steps(all, steps, fitted, folds);
  if (!of_memory.empty()) text += describe_memory(all, fitted, folds);
  knobs.insert(knobs.end(), of_memory.begin(), of_memory.end());
  Cluster shown = fitted;
  for (const Knob& knob : knobs) {
    text += fmt::format("   {} = {:.4g}\n", knob.name, knob.of(shown).value);
  }
  if (!config.search.plan_out.empty()) {
    std::vector<std::string> names;
    for (const std::string& file : all.files) names.push_back(file_name(file));
    write_fitted(fitted, knobs, config,
                 fmt::format("{} rows of {}", all.rows.size(), fmt::join(names, ", ")));
  }
  return text;
}

}  // namespace usp
