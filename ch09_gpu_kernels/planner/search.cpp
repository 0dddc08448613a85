#include "planner/search.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "accounting/memory.h"
#include "base/rules.h"
#include "planner/fit.h"
#include "planner/rows.h"
#include "planner/timed.h"
#include "tensor/console.h"

namespace usp {

namespace {

constexpr double kMargin = 1.25;  ///< of the formulas' best: what is beyond is not replayed
constexpr size_t kAtLeast = 24;   ///< is replayed, if so many fit
constexpr size_t kAtMost = 96;
constexpr int kUnreachable = 3;  ///< the exit code where nothing is as required

/// What --require asks for.
struct Requirement {
  std::string what;
  bool at_least;
  double value;

  bool holds(const Timed& timed, const Cluster& cluster) const {
    const double is = what == "mfu"    ? timed.mfu(cluster)
                      : what == "mem"  ? timed.gib()
                      : what == "step" ? timed.replayed.step
                                       : timed.tokens_per_second();
    return at_least ? is >= value : is <= value;
  }
};

std::vector<Requirement> parse_requirements(const std::string& text) {
  std::vector<Requirement> all;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    const size_t at = part.find_first_of("<>");
    const std::string what = part.substr(0, at);
    const bool known = what == "mfu" || what == "mem" || what == "step" || what == "tokens_per_s";
    double value = std::nan("");
    if (at != std::string::npos && at + 2 < part.size() && part[at + 1] == '=') {
      std::istringstream number(part.substr(at + 2));
      if (!(number >> value) || !number.eof()) value = std::nan("");
    }
    if (!known || std::isnan(value)) {
      usage_error(
          "require={}: {} must be one of mfu, mem, step, tokens_per_s with >= or <= and a "
          "number; try \"mfu>=0.4,mem<=75\"",
          text, part.empty() ? "an empty part" : part);
    }
    all.push_back({what, part[at] == '>', value});
  }
  return all;
}

/// A search under way: the candidates, those that were replayed, the text.
class LayoutSearch {
 public:
  explicit LayoutSearch(const TrainConfig& config)
      : config_(config),
        cluster_(read_cluster(config.search.cluster)),
        required_(parse_requirements(config.search.require)) {
    if (!cluster_.peak_tflops.contains(parse_dtype(config.dtype))) {
      std::vector<std::string_view> known;
      for (const auto& [dtype, peak] : cluster_.peak_tflops) known.push_back(name(dtype));
      usage_error("dtype={}: {} has no peak for it; try --dtype {}", config.dtype, cluster_.name,
                  fmt::join(known, " or "));
    }
    if (config.pipeline.updates_each_micro_batch()) {
      usage_error(
          "pp_schedule={}: a search lays out steps that end with their only update; try "
          "--pp_schedule 1f1b",
          config.pipeline.pp_schedule);
    }
  }

  SearchAnswer run() {
    found_ = make_candidates(config_, cluster_);
    if (found_.fit.empty()) refuse_all();
    time_best();
    std::erase_if(timed_, [&](const Timed& timed) {
      return !std::ranges::all_of(required_, [&](const Requirement& requirement) {
        return requirement.holds(timed, cluster_);
      });
    });
    const int code = timed_.empty() ? kUnreachable : 0;
    return {config_.search.plan_json ? json() : text(), code};
  }

 private:
  int64_t ranks() const {
    return config_.search.nodes * static_cast<int64_t>(cluster_.ranks_per_node.value);
  }

  /// Says what is missing: of the layout that needs least, how much.
  void refuse_all() const {
    if (found_.of_ranks == 0) {
      usage_error(
          "nodes={}: {} ranks cannot be laid out with {}; try --nodes {}, or leave out a size",
          config_.search.nodes, ranks(), given_sizes(), nodes_that_divide());
    }
    if (found_.too_large.empty()) {
      std::string why;
      if (found_.uneven > 0) {
        why = fmt::format("; a batch of {} tokens divides into whole micro-batches of none of them",
                          config_.planning.plan);
      }
      for (const auto& [rule, count] : found_.refused) why += fmt::format("; {}: {}", rule, count);
      usage_error("none of the {} layouts of {} ranks can be run{}: try --plan {}", found_.of_ranks,
                  ranks(), why, ranks() * config_.seq_len);
    }
    const Candidate& least = *std::ranges::min_element(found_.too_large, {}, &Candidate::gib);
    usage_error(
        "plan={}: nothing fits. The layout that needs least, {}, takes {:.1f} GiB on rank {}, most "
        "of it {}, and {} has {:g}: {:.1f} are missing; try --nodes {}",
        config_.planning.plan, layout_flags(least.config), least.gib, least.fullest, least.most,
        cluster_.name, cluster_.memory_gib.value, least.gib - cluster_.memory_gib.value,
        2 * config_.search.nodes);
  }

  /// The sizes of the command line, which are more than the ranks, or do not divide them.
  std::string given_sizes() const {
    const MeshSizes mesh = config_.mesh();
    std::vector<std::string> sizes;
    for (const auto& [flag, size] : {std::pair{"tp_size", mesh.tp},
                                     {"cp_size", mesh.cp},
                                     {"pp_size", mesh.pp},
                                     {"dp_size", mesh.dp}}) {
      if (config_.search.decides(flag)) sizes.push_back(fmt::format("{}={}", flag, size));
    }
    return fmt::format("{}", fmt::join(sizes, ", "));
  }

  int64_t nodes_that_divide() const {
    const MeshSizes mesh = config_.mesh();
    int64_t product = 1;
    for (const auto& [flag, size] : {std::pair{"tp_size", mesh.tp},
                                     {"cp_size", mesh.cp},
                                     {"pp_size", mesh.pp},
                                     {"dp_size", mesh.dp}}) {
      if (config_.search.decides(flag)) product *= size;
    }
    return product / std::gcd(product, static_cast<int64_t>(cluster_.ranks_per_node.value));
  }

  // [time_best]
  /// Lays out in time what the formulas find fast, and what they may be wrong about.
  void time_best() {
    std::vector<const Candidate*> order;
    for (const Candidate& candidate : found_.fit) order.push_back(&candidate);
    std::ranges::sort(order, {}, &Candidate::closed_form);
    const double limit = kMargin * order.front()->closed_form;
    const size_t least = std::max<size_t>(kAtLeast, 2 * config_.search.plan_best);
    for (size_t i = 0; i < order.size() && i < std::max(least, kAtMost); ++i) {
      if (i >= least && order[i]->closed_form > limit) break;
      timed_.push_back(time_step(*order[i], cluster_));
    }
    replayed_ = std::ssize(timed_);
    std::ranges::stable_sort(timed_, {}, [](const Timed& timed) { return timed.replayed.step; });
  }
  // [time_best]

  std::string heading() const {
    return fmt::format(
        "{}: {} node{} of {:g}, {} ranks, {:g} GiB each; {} tokens a step, {} a sample, {}\n\n",
        cluster_.name, config_.search.nodes, config_.search.nodes == 1 ? "" : "s",
        cluster_.ranks_per_node.value, ranks(), cluster_.memory_gib.value, config_.planning.plan,
        config_.seq_len, config_.dtype);
  }

  std::string text() const {
    std::string text = heading() + fits() + reaches() + fastest();
    return text + rests_on();
  }

  std::string fits() const {
    std::string text = fmt::format(
        "1. What fits\n   {} ways to lay out the ranks; with ZeRO's stages, recomputation and "
        "micro-batches {} layouts fit, {} do not\n",
        found_.of_ranks, found_.fit.size(), found_.too_large.size());
    for (const char* category :
         {"weights", "gradients", "optimizer", "activations", "communication"}) {
      std::vector<const Candidate*> of;
      for (const Candidate& candidate : found_.too_large) {
        if (candidate.most == category) of.push_back(&candidate);
      }
      if (of.empty()) continue;
      const Candidate& closest = **std::ranges::min_element(of, {}, &Candidate::gib);
      text +=
          fmt::format("   {:>4} for their {}; the closest by {:.1f} GiB, on rank {}:\n        {}\n",
                      of.size(), category, closest.gib - cluster_.memory_gib.value, closest.fullest,
                      layout_flags(closest.config));
    }
    for (const auto& [rule, count] : found_.refused) {
      text += fmt::format("   {:>4} refused: {}\n", count, rule);
    }
    return text + "\n";
  }

  std::string reaches() const {
    const int64_t samples = std::llround(double(config_.planning.plan) / double(config_.seq_len));
    int64_t fewest = INT64_MAX, most = 0;
    for (const Candidate& candidate : found_.fit) {
      fewest = std::min(fewest, candidate.config.grad_acc_steps);
      most = std::max(most, candidate.config.grad_acc_steps);
    }
    return fmt::format(
        "2. How the batch is reached\n   {} samples = dp_size x micro_batch_size x grad_acc_steps; "
        "from {} to {} steps of accumulation\n   {} times they do not divide\n\n",
        samples, fewest, most, found_.uneven);
  }

  static std::string dimension(const std::string& group) {
    if (group == "dp_cp" || group == "shard" || group == "replica" || group == "edp") return "dp";
    if (group.starts_with("cp")) return "cp";
    if (group.starts_with("ep") || group == "stage") return "ep";  // and how full experts are
    if (group == "tp_kv") return "tp";
    if (group == "world" || group == "mirror" || group == "embedding") return "pp";
    return group;
  }

  static std::map<std::string, double> exposed(const Timed& timed) {
    std::map<std::string, double> by_dimension;
    std::map<std::string, bool> groups;
    for (const RankTime& time : timed.replayed.classes) {
      for (const auto& [group, seconds] : time.exposed) groups[group] = true;
    }
    for (const auto& [group, is_there] : groups) {
      by_dimension[dimension(group)] += timed.replayed.exposed(timed.classes, group);
    }
    return by_dimension;
  }

  std::string fastest() const {
    std::string text = fmt::format(
        "3. What is fastest\n   {} of those that fit are laid out in time: whatever the formulas "
        "put within {:g} of their best, and {} at least\n",
        replayed_, kMargin, kAtLeast);
    if (timed_.empty()) {
      return text + fmt::format("   none is as required: {}\n", config_.search.require);
    }
    text += fmt::format("\n{:>4}{:>10}{:>10}{:>14}{:>7}{:>7}{:>8}   {}\n", "", "step, s", "formula",
                        "tokens/s/rank", "MFU", "GiB", "bubble", "exposed");
    for (int64_t i = 0; i < std::ssize(timed_) && i < config_.search.plan_best; ++i) {
      const Timed& timed = timed_[i];
      std::vector<std::string> waits;
      for (const auto& [what, share] : exposed(timed)) {
        if (what != "pp" && share >= 0.0005)
          waits.push_back(fmt::format("{} {:.1f}%", what, 100 * share));
      }
      text += fmt::format(
          "{:>4}{:>10.3f}{:>10.3f}{:>14.0f}{:>6.1f}%{:>7.1f}{:>7.1f}%   {}\n      {}\n", i + 1,
          timed.replayed.step, timed.candidate.closed_form,
          timed.tokens_per_second() / double(ranks()), 100 * timed.mfu(cluster_), timed.gib(),
          100 * timed.replayed.bubble(timed.classes), fmt::format("{}", fmt::join(waits, ", ")),
          layout_flags(timed.candidate.config));
    }
    return text;
  }

  std::string rests_on() const {
    if (timed_.empty()) return "";
    std::vector<std::string> parts;
    int all = 0;
    for (const auto& [origin, count] : timed_.front().origins) {
      parts.push_back(fmt::format("{} {}", count, name(origin)));
      all += count;
    }
    return fmt::format("\nThe first rests on {} numbers of {}: {}.\n", all, cluster_.name,
                       fmt::join(parts, ", "));
  }

  std::string json() const {
    nlohmann::ordered_json json;
    json["cluster"] = cluster_.name;
    json["ranks"] = ranks();
    json["tokens"] = config_.planning.plan;
    json["fit"] = found_.fit.size();
    json["too_large"] = found_.too_large.size();
    json["replayed"] = replayed_;
    json["best"] = nlohmann::ordered_json::array();
    for (int64_t i = 0; i < std::ssize(timed_) && i < config_.search.plan_best; ++i) {
      const Timed& timed = timed_[i];
      nlohmann::ordered_json row;
      row["flags"] = layout_flags(timed.candidate.config);
      row["step_s"] = timed.replayed.step;
      row["formula_s"] = timed.candidate.closed_form;
      row["tokens_per_s_per_rank"] = timed.tokens_per_second() / double(ranks());
      row["mfu"] = timed.mfu(cluster_);
      row["gib"] = timed.gib();
      row["fullest_rank"] = timed.fullest();
      row["bubble"] = timed.replayed.bubble(timed.classes);
      row["exposed"] = exposed(timed);
      for (const auto& [origin, count] : timed.origins) {
        row["numbers"][std::string(name(origin))] = count;
      }
      json["best"].push_back(std::move(row));
    }
    return json.dump(2) + "\n";
  }

  const TrainConfig& config_;
  const Cluster cluster_;
  const std::vector<Requirement> required_;
  Candidates found_;
  std::vector<Timed> timed_;
  int64_t replayed_ = 0;
};

}  // namespace

void SearchConfig::bind(Args& args) {
  args.group("Search");
  args.bind("cluster", cluster,
            "with --plan: look for the best layout on this cluster, a name or a file")
      .may_differ_on_resume();
  args.bind("nodes", nodes, "nodes of the cluster").may_differ_on_resume();
  args.bind("plan_best", plan_best, "layouts to print, the fastest first").may_differ_on_resume();
  args.bind("plan_json", plan_json, "print them as JSON").may_differ_on_resume();
  args.bind("require", require,
            "what a layout has to reach, such as \"mfu>=0.4,mem<=75\"; exit code 3 if none does")
      .may_differ_on_resume();
  args.bind("plan_rows", plan_rows, "predict each layout of this table (.csv) on the cluster")
      .may_differ_on_resume();
  args.bind("plan_out", plan_out, "write the table to this file, with what is predicted")
      .may_differ_on_resume();
  args.bind("plan_fit", plan_fit,
            "fit the cluster's numbers to the measured rows that are so: all, or \"pp<=1\"")
      .may_differ_on_resume();
}

void SearchConfig::validate(const Args& args) {
  check_range("nodes", double(nodes), 1, 1 << 16);
  check_range("plan_best", double(plan_best), 1, 1000);
  chosen.clear();
  for (const char* flag : {"tp_size", "sequence_parallel", "cp_size", "pp_size", "ep_size",
                           "dp_size", "zero_stage", "micro_batch_size", "recompute"}) {
    if (args.typed(flag)) chosen += std::string(flag) + " ";
  }
  if (cluster.empty()) {
    for (const char* flag : {"nodes", "plan_best", "plan_json", "require", "plan_rows"}) {
      if (!args.typed(flag)) continue;
      refuse("search_has_a_cluster", {fmt::format("leave out --{}", flag)},
             "{} is about a search, which needs --cluster and --plan", flag);
    }
  }
  parse_requirements(require);
}

bool SearchConfig::decides(const std::string& flag) const {
  return (" " + chosen).find(" " + flag + " ") != std::string::npos;
}

bool SearchConfig::plans(const TrainConfig& run) const {
  return run.planning.plan > 0 || !plan_rows.empty();
}

void SearchConfig::check(const TrainConfig& run) const {
  if (!cluster.empty() && run.planning.plan == 0 && plan_rows.empty()) {
    refuse("search_has_a_batch", {"--plan 1048576", "leave out --cluster"},
           "cluster={} needs a batch to plan for: --plan", cluster);
  }
}

SearchAnswer search(const TrainConfig& config) { return LayoutSearch(config).run(); }

int print_plan(const TrainConfig& config) {
  if (!config.search.plan_rows.empty()) {
    print("{}", !config.search.plan_fit.empty() ? fit_rows(config) : predict_rows(config));
    return 0;
  }
  const SearchAnswer answer =
      config.search.cluster.empty() ? SearchAnswer{plan_batch(config)} : search(config);
  print("{}", answer.text);
  return answer.exit_code;
}

}  // namespace usp
