#include "planner/search.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "accounting/plan.h"
#include "base/file_writer.h"
#include "base/rules.h"
#include "planner/calibrate.h"
#include "planner/change.h"
#include "planner/derivatives.h"
#include "planner/fit.h"
#include "planner/layout_search.h"
#include "planner/rows.h"
#include "planner/what_if.h"
#include "planner/why.h"
#include "tensor/console.h"

namespace usp {

namespace {

constexpr int64_t kDerived = 10;  ///< of the best: their shared steps, and derivatives as JSON
constexpr double kShares = 0.03;  ///< of a step: what sharing adds that is worth a word

/// What a search has found, in words or as JSON.
class FoundLayouts {
 public:
  explicit FoundLayouts(const LayoutSearch& search) : search_(search) {
    if (timed_.empty()) return;
    for (int64_t i = 0; i < std::min(kDerived, shown()); ++i) {
      const RecordedStep step(timed_[i].candidate,
                              static_cast<int64_t>(cluster_.ranks_per_node.value),
                              search_.records());
      shared_.push_back(step.shared(cluster_));
      if (i > 0 && !config_.search.plan_json) continue;
      derivatives_.push_back(derivatives(step, timed_[i], cluster_));
    }
    more_.emplace(config_, changed(cluster_, "capacity", kMore));
    more_->run(&search_, &search_);
  }

  std::string text() const {
    return search_.heading() + fits() + reaches() + fastest() + depends_on() + costs() + rests_on();
  }

  std::string json() const {
    nlohmann::ordered_json json;
    json["cluster"] = cluster_.name;
    json["ranks"] = search_.ranks();
    json["tokens"] = config_.planning.plan;
    if (search_.asked() != config_.planning.plan) json["tokens_asked"] = search_.asked();
    json["fit"] = found_.fit.size();
    json["too_large"] = found_.too_large.size();
    json["replayed"] = search_.replayed();
    json["best"] = nlohmann::ordered_json::array();
    for (int64_t i = 0; i < shown(); ++i) {
      const Timed& timed = timed_[i];
      nlohmann::ordered_json row;
      row["flags"] = layout_flags(timed.candidate.config);
      row["step_s"] = timed.replayed.step;
      row["formula_s"] = timed.candidate.closed_form;
      if (i < std::ssize(shared_)) row["shared_s"] = shared_[i];
      row["tokens_per_s_per_rank"] = timed.tokens_per_second() / double(search_.ranks());
      row["mfu"] = timed.mfu(cluster_);
      if (cluster_.price) row["price_per_million_tokens"] = price_of_a_million(timed);
      row["gib"] = timed.gib();
      row["fullest_rank"] = timed.fullest();
      row["bubble"] = timed.replayed.bubble(timed.classes);
      row["exposed"] = exposed_by_dimension(timed);
      for (const auto& [origin, count] : timed.origins) {
        row["numbers"][std::string(name(origin))] = count;
      }
      if (i < std::ssize(derivatives_)) add_derivatives(row, derivatives_[i]);
      json["best"].push_back(std::move(row));
    }
    if (more_) {
      json["plus_10_percent_capacity"] = {
          {"step", change_with_more()},
          {"flags", layout_flags(more_->timed().front().candidate.config)}};
    }
    return json.dump(2) + "\n";
  }

 private:
  static void add_derivatives(nlohmann::ordered_json& row, const std::vector<Derivative>& all) {
    for (const Derivative& derivative : all) {
      const std::string of(name(derivative.of));
      row["critical_path_s"][of] = derivative.on_path;
      row["plus_10_percent"][of] = derivative.change;
      if (derivative.new_path) row["on_the_old_path"][of] = derivative.old_path;
    }
  }

  /// With more memory: of the best step, relative.
  double change_with_more() const {
    return more_->timed().front().replayed.step / timed_.front().replayed.step - 1;
  }

  int64_t shown() const { return std::min<int64_t>(std::ssize(timed_), config_.search.plan_best); }

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
    const int64_t samples = config_.planning.plan / config_.seq_len;
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

  std::string fastest() const {
    std::string text = fmt::format(
        "3. What is fastest\n   {} of those that fit are laid out in time: whatever the formulas "
        "put within {:g} of their best, or below the first here, and {} at least\n",
        search_.replayed(), LayoutSearch::kMargin, LayoutSearch::kAtLeast);
    if (timed_.empty()) {
      return text + fmt::format("   none is as required: {}\n", config_.search.require);
    }
    text += fmt::format("\n{:>4}{:>10}{:>10}{:>10}{:>14}{:>7}{:>7}{:>8}   {}\n", "", "step, s",
                        "shared", "formula", "tokens/s/rank", "MFU", "GiB", "bubble", "exposed");
    for (int64_t i = 0; i < shown(); ++i) {
      const Timed& timed = timed_[i];
      std::vector<std::string> waits;
      for (const auto& [what, share] : exposed_by_dimension(timed)) {
        if (what != "pp" && share >= 0.0005)
          waits.push_back(fmt::format("{} {:.1f}%", what, 100 * share));
      }
      const std::string shared = i < std::ssize(shared_) ? fmt::format("{:.3f}", shared_[i]) : "";
      text += fmt::format(
          "{:>4}{:>10.3f}{:>10}{:>10.3f}{:>14.0f}{:>6.1f}%{:>7.1f}{:>7.1f}%   {}\n      {}\n",
          i + 1, timed.replayed.step, shared, timed.candidate.closed_form,
          timed.tokens_per_second() / double(search_.ranks()), 100 * timed.mfu(cluster_),
          timed.gib(), 100 * timed.replayed.bubble(timed.classes),
          fmt::format("{}", fmt::join(waits, ", ")), layout_flags(timed.candidate.config));
    }
    return text + shares();
  }

  /// Which of the best rest on each communicator having the links to itself.
  std::string shares() const {
    std::vector<std::string> longer;
    for (int64_t i = 0; i < std::ssize(shared_); ++i) {
      const double more = shared_[i] / timed_[i].replayed.step - 1;
      if (more > kShares) longer.push_back(fmt::format("number {} by {:.1f}%", i + 1, 100 * more));
    }
    if (longer.empty()) return "";
    return fmt::format(
        "   Where exchanges that are under way at once share links and cores, steps are longer: "
        "{}\n",
        fmt::join(longer, ", "));
  }

  // [depends_on]
  /// What the first depends on: its critical path, and its step with more of everything.
  std::string depends_on() const {
    if (timed_.empty()) return "";
    const double step = timed_.front().replayed.step;
    std::string text = fmt::format("\nWhat the first depends on\n{:>35}{:>16}{:>18}\n",
                                   "on its critical path", "step with +10%", "on the old path");
    for (const Derivative& derivative : derivatives_.front()) {
      text +=
          fmt::format("   {:<11}{:>13.3f} s{:>5.1f}%{:>15.2f}%", name(derivative.of),
                      derivative.on_path, 100 * derivative.on_path / step, 100 * derivative.change);
      text += derivative.new_path ? fmt::format("{:>17.2f}%\n", 100 * derivative.old_path) : "\n";
    }
    const std::string flags = layout_flags(more_->timed().front().candidate.config);
    const bool same = flags == layout_flags(timed_.front().candidate.config);
    return text + fmt::format("   {:<11}{:>36.2f}%  {}\n", "capacity", 100 * change_with_more(),
                              same ? "the same layout" : "by another layout:\n      " + flags);
  }
  // [depends_on]

  /// What a million tokens cost, in the money of the cluster's price.
  double price_of_a_million(const Timed& timed) const {
    const double an_hour = cluster_.price->value * double(search_.ranks());
    return 1e6 * an_hour / (3600 * timed.tokens_per_second());
  }

  std::string costs() const {
    if (timed_.empty() || !cluster_.price) return "";
    return fmt::format("\nAt {:g} a GPU and hour, a million tokens cost {:.4g} with the first.\n",
                       cluster_.price->value, price_of_a_million(timed_.front()));
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

  const LayoutSearch& search_;
  const TrainConfig& config_ = search_.config();
  const Cluster& cluster_ = search_.cluster();
  const Candidates& found_ = search_.candidates();
  const std::vector<Timed>& timed_ = search_.timed();
  std::vector<std::vector<Derivative>> derivatives_;  ///< of the best
  std::vector<double> shared_;        ///< steps of these where ranks share links and cores
  std::optional<LayoutSearch> more_;  ///< with 10 % more of each rank's memory
};

/// The first layout's, with few of its micro-batches.
void write_timeline(const LayoutSearch& search) {
  const Cluster& cluster = search.cluster();
  const RecordedStep step(search.timed().front().candidate,
                          static_cast<int64_t>(cluster.ranks_per_node.value), search.records());
  write_file(search.config().search.plan_out, step.timeline(cluster));
}

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
  args.bind("what_if", what_if,
            "search on a changed cluster as well: net=+100%, gpu=a100, ranks=-8, or several")
      .may_differ_on_resume();
  args.bind("why", why, "compare two layouts part by part: \"1; 2\" of the list, or flags")
      .may_differ_on_resume();
  args.bind("plan_rows", plan_rows, "predict each layout of this table (.csv) on the cluster")
      .is_question();
  args.bind("plan_runs", plan_runs,
            "calibrate the cluster with these, with commas between: directories of traced runs, "
            "outputs of nccl-tests")
      .is_question();
  args.bind("plan_out", plan_out,
            "write the table, the cluster, or the timeline of a search's first layout to this file")
      .may_differ_on_resume();
  args.bind("plan_fit", plan_fit,
            "fit the cluster's numbers to the measured rows that are so: all, or \"pp<=1\"")
      .may_differ_on_resume();
}

void SearchConfig::validate(const Args& args) {
  check_range("nodes", double(nodes), 1, double(kMaxNodes));
  check_range("plan_best", double(plan_best), 1, 1000);
  chosen.clear();
  for (const char* flag : {"tp_size", "sequence_parallel", "cp_size", "pp_size", "ep_size",
                           "dp_size", "zero_stage", "micro_batch_size", "recompute"}) {
    if (args.typed(flag)) chosen.insert(flag);
  }
  if (cluster.empty()) {
    for (const char* flag : {"nodes", "plan_best", "plan_json", "require", "what_if", "why",
                             "plan_rows", "plan_runs"}) {
      if (!args.typed(flag)) continue;
      refuse_silent("search_has_a_cluster", {fmt::format("leave out --{}", flag)},
                    "{} is about a search, which needs --cluster and --plan", flag);
    }
  }
  for (const char* flag : {"plan_out", "plan_fit"}) {
    const bool of_search = !cluster.empty() && flag == std::string_view("plan_out");
    if (of_search || !plan_rows.empty() || !plan_runs.empty() || !args.typed(flag)) continue;
    refuse_silent("search_has_a_cluster", {fmt::format("leave out --{}", flag)},
                  "{} is about a table, which needs --plan_rows or --plan_runs", flag);
  }
  for (const char* flag : {"nodes", "plan_best", "plan_json", "require", "what_if", "why"}) {
    if ((plan_rows.empty() && plan_runs.empty()) || !args.typed(flag)) continue;
    refuse_silent("table_is_no_search", {fmt::format("leave out --{}", flag)},
                  "{} is about a search, not about tables or traces", flag);
  }
  parse_requirements(require);
  if (!what_if.empty()) parse_changes(what_if);
  if (!why.empty()) sides_of_why(why);
  if (!why.empty() && !what_if.empty()) {
    refuse_silent("why_or_what_if", {"leave out --why", "leave out --what_if"},
                  "why={} and what_if={} are two questions, with an answer each", why, what_if);
  }
  for (const auto& [flag, value] : {std::pair{"why", &why}, {"what_if", &what_if}}) {
    if (value->empty() || plan_out.empty()) continue;
    refuse_silent("why_or_what_if", {"leave out --plan_out", fmt::format("leave out --{}", flag)},
                  "plan_out={} is for the timeline of one search, and {}={} compares", plan_out,
                  flag, *value);
  }
}

bool SearchConfig::plans(const TrainConfig& run) const {
  return run.planning.plan > 0 || !plan_rows.empty() || !plan_runs.empty();
}

void SearchConfig::check(const TrainConfig& run) const {
  if (!cluster.empty() && !plans(run)) {
    refuse_silent("search_has_a_batch", {"--plan 1048576", "leave out --cluster"},
                  "cluster={} needs a batch to plan for: --plan", cluster);
  }
}

SearchAnswer search(const TrainConfig& config) {
  if (!config.search.what_if.empty()) return what_if(config);
  if (!config.search.why.empty()) return why(config);
  LayoutSearch search(config, read_cluster(config.search.cluster));
  search.run();
  const FoundLayouts found(search);
  if (!config.search.plan_out.empty() && !search.timed().empty()) write_timeline(search);
  return {config.search.plan_json ? found.json() : found.text(),
          search.timed().empty() ? kNothingAsRequired : 0};
}

int print_plan(const TrainConfig& config) {
  if (!config.search.plan_runs.empty()) {
    print("{}", calibrate_cluster(config));
    return 0;
  }
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
