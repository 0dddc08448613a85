#include "planner/layout_search.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "base/check.h"

namespace usp {

namespace {

std::vector<std::pair<const char*, int64_t>> sizes_of(const TrainConfig& config) {
  const MeshSizes mesh = config.mesh();
  return {{"tp_size", mesh.tp}, {"cp_size", mesh.cp}, {"pp_size", mesh.pp}, {"dp_size", mesh.dp}};
}

}  // namespace

bool Requirement::holds(const Timed& timed, const Cluster& cluster) const {
  const double is = what == "mfu"    ? timed.mfu(cluster)
                    : what == "mem"  ? timed.gib()
                    : what == "step" ? timed.replayed.step
                                     : timed.tokens_per_second();
  return at_least ? is >= value : is <= value;
}

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

LayoutSearch::LayoutSearch(TrainConfig config, Cluster cluster)
    : config_(std::move(config)),
      cluster_(std::move(cluster)),
      asked_(config_.planning.plan),
      required_(parse_requirements(config_.search.require)) {
  if (!cluster_.peak_tflops.contains(parse_dtype(config_.dtype))) {
    std::vector<std::string_view> known;
    for (const auto& [dtype, peak] : cluster_.peak_tflops) known.push_back(name(dtype));
    usage_error("dtype={}: {} has no peak for it; try --dtype {}", config_.dtype, cluster_.name,
                fmt::join(known, " or "));
  }
  const ReachedBatch batch = reached_batch(config_, cluster_);
  if (!batch.why.empty()) {
    batch_note_ =
        fmt::format("{} tokens are asked for, which {}; {} samples are the nearest batch\n", asked_,
                    batch.why, batch.samples);
  }
  config_.planning.plan = batch.samples * config_.seq_len;
}

void LayoutSearch::run(const LayoutSearch* same_memory, const LayoutSearch* same_steps) {
  found_ =
      make_candidates(config_, cluster_, same_memory == nullptr ? nullptr : &same_memory->found_);
  if (found_.fit.empty()) refuse_all();
  if (same_steps != nullptr) records_ = same_steps->records_;
  time_best(same_steps);
  timed_ = all_timed_;
  std::erase_if(timed_, [&](const Timed& timed) {
    return !std::ranges::all_of(required_, [&](const Requirement& requirement) {
      return requirement.holds(timed, cluster_);
    });
  });
}

int64_t LayoutSearch::ranks() const {
  return config_.search.nodes * static_cast<int64_t>(cluster_.ranks_per_node.value);
}

// [refuse_all]
/// Says what is missing: of the layout that needs least, how much; and what would help.
void LayoutSearch::refuse_all() const {
  const std::string help = what_helps();
  if (found_.of_ranks == 0) {
    usage_error("nodes={}: {} ranks cannot be laid out with {}; {}", config_.search.nodes, ranks(),
                given_sizes(), help.empty() ? "leave out the sizes" : help);
  }
  if (found_.too_large.empty()) {
    const std::string first = found_.refusal.empty() ? "" : " (the first: " + found_.refusal + ")";
    usage_error("none of the {} layouts of {} ranks can be run{}; {}", found_.of_ranks, ranks(),
                first, help.empty() ? "leave out the flags that the search would choose" : help);
  }
  const Candidate& least = *std::ranges::min_element(found_.too_large, {}, &Candidate::gib);
  const double missing = least.gib - cluster_.memory_gib.value;
  usage_error(
      "plan={}: nothing fits. The layout that needs least, {}, takes {:.1f} GiB on rank {}, most "
      "of it {}, and {} has {:g}: {:.1f} are missing; {}",
      asked_, layout_flags(least.config), least.gib, least.fullest, least.most, cluster_.name,
      cluster_.memory_gib.value, missing,
      help.empty() ? fmt::format("try a cluster with {:.3g} GiB a rank", least.gib * 1.01) : help);
}

/// The cheapest changes with which a layout fits: the fewest nodes, by doubling, and a flag that is
/// left out. What is advised has been tried.
std::string LayoutSearch::what_helps() const {
  TrainConfig asked = config_;
  asked.planning.plan = asked_;
  const auto helps = [&](const TrainConfig& changed) {
    try {
      const LayoutSearch other(changed, cluster_);
      const Candidates* known = other.ranks() == ranks() ? &found_ : nullptr;
      return !make_candidates(other.config_, cluster_, known).fit.empty();
    } catch (const UsageError&) {
      return false;
    }
  };
  std::vector<std::string> ways;
  TrainConfig more = asked;
  more.search.nodes = found_.of_ranks == 0 ? nodes_that_divide() : 2 * asked.search.nodes;
  for (int i = 0; i < kDoublings && ways.empty() && more.search.nodes <= SearchConfig::kMaxNodes;
       ++i, more.search.nodes *= 2) {
    if (helps(more)) ways.push_back(fmt::format("try --nodes {}", more.search.nodes));
  }
  for (const std::string& flag : asked.search.chosen) {
    TrainConfig without = asked;
    without.search.chosen.erase(flag);
    if (!helps(without)) continue;
    ways.push_back("leave out --" + flag);
    break;
  }
  return fmt::format("{}", fmt::join(ways, ", or "));
}
// [refuse_all]

/// The sizes of the command line, which are more than the ranks, or do not divide them.
std::string LayoutSearch::given_sizes() const {
  std::vector<std::string> sizes;
  for (const auto& [flag, size] : sizes_of(config_)) {
    if (config_.search.decides(flag)) sizes.push_back(fmt::format("{}={}", flag, size));
  }
  return fmt::format("{}", fmt::join(sizes, ", "));
}

int64_t LayoutSearch::nodes_that_divide() const {
  int64_t product = 1;
  for (const auto& [flag, size] : sizes_of(config_)) {
    if (config_.search.decides(flag)) product *= size;
  }
  return product / std::gcd(product, static_cast<int64_t>(cluster_.ranks_per_node.value));
}

// [time_best]
/// Lays out in time what the formulas find fast, and what they may be wrong about.
void LayoutSearch::time_best(const LayoutSearch* same_steps) {
  std::vector<const Candidate*> order;
  for (const Candidate& candidate : found_.fit) order.push_back(&candidate);
  std::ranges::sort(order, {}, &Candidate::closed_form);
  const double limit = kMargin * order.front()->closed_form;
  double fastest = HUGE_VAL;
  const size_t least = std::max<size_t>(kAtLeast, 2 * config_.search.plan_best);
  for (size_t i = 0; i < order.size() && i < std::max(least, kAtMost); ++i) {
    // The formulas are too fast: what they find slower than a step that is laid out is not best.
    if (i >= least && order[i]->closed_form > std::max(limit, fastest)) break;
    const Timed* timed = same_steps == nullptr ? nullptr : same_steps->find(order[i]->config);
    all_timed_.push_back(timed == nullptr ? time_step(*order[i], cluster_, *records_) : *timed);
    fastest = std::min(fastest, all_timed_.back().replayed.step);
  }
  std::ranges::stable_sort(all_timed_, {}, [](const Timed& timed) { return timed.replayed.step; });
}
// [time_best]

/// What has been replayed of a layout; nullptr: it has not.
const Timed* LayoutSearch::find(const TrainConfig& layout) const {
  const std::string flags = layout_flags(layout);
  const auto found = std::ranges::find_if(all_timed_, [&](const Timed& timed) {
    return layout_flags(timed.candidate.config) == flags;
  });
  return found == all_timed_.end() ? nullptr : &*found;
}

std::string LayoutSearch::heading() const {
  return fmt::format(
      "{}: {} node{} of {:g}, {} ranks, {:g} GiB each; {} tokens a step, {} a sample, {}\n{}\n",
      cluster_.name, config_.search.nodes, config_.search.nodes == 1 ? "" : "s",
      cluster_.ranks_per_node.value, ranks(), cluster_.memory_gib.value, config_.planning.plan,
      config_.seq_len, config_.dtype, batch_note_);
}

std::map<std::string, double> exposed_by_dimension(const Timed& timed) {
  std::map<std::string, double> by_dimension;
  std::map<std::string, bool> groups;
  for (const RankTime& time : timed.replayed.classes) {
    for (const auto& [group, seconds] : time.exposed) groups[group] = true;
  }
  for (const auto& [group, is_there] : groups) {
    by_dimension[dimension_of(group)] += timed.replayed.exposed(timed.classes, group);
  }
  return by_dimension;
}

}  // namespace usp
