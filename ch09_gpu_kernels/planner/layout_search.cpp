#include "planner/layout_search.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "base/check.h"

namespace usp {

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
      required_(parse_requirements(config_.search.require)) {
  if (!cluster_.peak_tflops.contains(parse_dtype(config_.dtype))) {
    std::vector<std::string_view> known;
    for (const auto& [dtype, peak] : cluster_.peak_tflops) known.push_back(name(dtype));
    usage_error("dtype={}: {} has no peak for it; try --dtype {}", config_.dtype, cluster_.name,
                fmt::join(known, " or "));
  }
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

/// Says what is missing: of the layout that needs least, how much.
void LayoutSearch::refuse_all() const {
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
std::string LayoutSearch::given_sizes() const {
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

int64_t LayoutSearch::nodes_that_divide() const {
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
      "{}: {} node{} of {:g}, {} ranks, {:g} GiB each; {} tokens a step, {} a sample, {}\n\n",
      cluster_.name, config_.search.nodes, config_.search.nodes == 1 ? "" : "s",
      cluster_.ranks_per_node.value, ranks(), cluster_.memory_gib.value, config_.planning.plan,
      config_.seq_len, config_.dtype);
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
