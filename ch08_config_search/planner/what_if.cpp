#include "planner/what_if.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "base/check.h"
#include "planner/change.h"
#include "planner/layout_search.h"

namespace usp {

namespace {

/// The cluster and how much of it, as the changes leave them.
struct Altered {
  TrainConfig config;
  Cluster cluster;
};

/// A node more or less, with all of its ranks.
void change_ranks(Altered& altered, const TrainConfig& before, int64_t ranks) {
  const auto node = static_cast<int64_t>(altered.cluster.ranks_per_node.value);
  const int64_t nodes = before.search.nodes + ranks / node;
  if (ranks % node != 0 || nodes < 1) {
    usage_error(
        "what_if={}: of {} node{} of {} ranks, whole nodes come or go and one stays; try "
        "ranks={:+}",
        before.search.what_if, before.search.nodes, before.search.nodes == 1 ? "" : "s", node,
        before.search.nodes > 1 ? -node : node);
  }
  altered.config.search.nodes = nodes;
}

// [altered]
Altered alter(const TrainConfig& config, const Cluster& cluster) {
  Altered altered{config, cluster};
  int64_t ranks = 0;
  for (const Change& change : parse_changes(config.search.what_if)) {
    if (change.key == "ranks") {
      ranks = change.ranks;
    } else if (change.key == "gpu") {
      const std::string flag = fmt::format("what_if={}: gpu", config.search.what_if);
      altered.cluster = with_cards(altered.cluster, read_cluster(change.gpu, flag));
    } else {
      altered.cluster = changed(altered.cluster, change.key, change.factor);
    }
  }
  if (ranks != 0) change_ranks(altered, config, ranks);
  return altered;
}
// [altered]

/// Two searches, and what they say of each other.
class Comparison {
 public:
  explicit Comparison(const TrainConfig& config) : config_(config), before_(config, cluster()) {
    Altered altered = alter(config, before_.cluster());
    before_.run();
    try {
      then_.emplace(std::move(altered.config), std::move(altered.cluster));
      then_->run(then_->ranks() == before_.ranks() ? &before_ : nullptr);
    } catch (const UsageError& error) {
      nothing_ = error.what();
    }
  }

  SearchAnswer answer() const {
    const bool some = nothing_.empty() && !then_->timed().empty() && !before_.timed().empty();
    return {config_.search.plan_json ? json() : text(), some ? 0 : kNothingAsRequired};
  }

 private:
  Cluster cluster() const { return read_cluster(config_.search.cluster); }

  static const Timed* best(const LayoutSearch& search) {
    return search.timed().empty() ? nullptr : &search.timed().front();
  }

  /// The best layout of before, on the changed cluster; none where its ranks are not there, or
  /// where it does not fit.
  std::optional<Timed> kept() const {
    const Timed* first = best(before_);
    if (first == nullptr || !then_ || then_->ranks() != before_.ranks()) return {};
    if (first->gib() > then_->cluster().memory_gib.value) return {};
    return time_step(first->candidate, then_->cluster());
  }

  std::string text() const {
    std::string text = before_.heading();
    text +=
        fmt::format("What if {}\n{:>18}{:>14}{:>14}\n", config_.search.what_if, "", "now", "then");
    const Timed *now = best(before_), *then = then_ ? best(*then_) : nullptr;
    const auto row = [&](const char* what, auto value) {
      const std::string a = now == nullptr ? "-" : value(before_, *now);
      const std::string b = then == nullptr ? "-" : value(*then_, *then);
      text += fmt::format("   {:<15}{:>14}{:>14}\n", what, a, b);
    };
    using Search = const LayoutSearch&;
    row("ranks", [](Search search, const Timed&) { return fmt::format("{}", search.ranks()); });
    row("tokens a step", [](Search search, const Timed&) {
      return fmt::format("{}", search.config().planning.plan);
    });
    row("layouts that fit", [](Search search, const Timed&) {
      return fmt::format("{}", search.candidates().fit.size());
    });
    row("step, s",
        [](Search, const Timed& timed) { return fmt::format("{:.3f}", timed.replayed.step); });
    row("tokens/s", [](Search, const Timed& timed) {
      return fmt::format("{:.0f}", timed.tokens_per_second());
    });
    row("MFU", [](Search search, const Timed& timed) {
      return fmt::format("{:.1f}%", 100 * timed.mfu(search.cluster()));
    });
    row("GiB", [](Search, const Timed& timed) { return fmt::format("{:.1f}", timed.gib()); });
    row("bubble", [](Search, const Timed& timed) {
      return fmt::format("{:.1f}%", 100 * timed.replayed.bubble(timed.classes));
    });
    return text + layouts(now, then);
  }

  std::string layouts(const Timed* now, const Timed* then) const {
    if (now == nullptr)
      return fmt::format("now:  none is as required: {}\n", config_.search.require);
    const std::string before = layout_flags(now->candidate.config);
    std::string text = fmt::format("now:  {}\n", before);
    if (then_ && !then_->batch_note().empty()) text += "then: " + then_->batch_note();
    if (!nothing_.empty()) return text + fmt::format("then: {}\n", nothing_);
    if (then == nullptr) {
      return text + fmt::format("then: none is as required: {}\n", config_.search.require);
    }
    const std::string after = layout_flags(then->candidate.config);
    if (after == before) return text + "then: the same layout\n";
    text += fmt::format("then: {}\n", after);
    if (then_->ranks() != before_.ranks()) return text;
    const std::optional<Timed> same = kept();
    return text +
           (same ? fmt::format("The layout of now would take {:.3f} s then.\n", same->replayed.step)
                 : "The layout of now does not fit then.\n");
  }

  static nlohmann::ordered_json json_of(const LayoutSearch& search) {
    nlohmann::ordered_json json;
    json["cluster"] = search.cluster().name;
    json["ranks"] = search.ranks();
    json["tokens"] = search.config().planning.plan;
    if (search.asked() != search.config().planning.plan) json["tokens_asked"] = search.asked();
    json["fit"] = search.candidates().fit.size();
    const Timed* timed = best(search);
    if (timed == nullptr) return json;
    json["flags"] = layout_flags(timed->candidate.config);
    json["step_s"] = timed->replayed.step;
    json["tokens_per_s"] = timed->tokens_per_second();
    json["mfu"] = timed->mfu(search.cluster());
    json["gib"] = timed->gib();
    json["bubble"] = timed->replayed.bubble(timed->classes);
    return json;
  }

  std::string json() const {
    nlohmann::ordered_json json;
    json["what_if"] = config_.search.what_if;
    json["now"] = json_of(before_);
    if (then_) json["then"] = json_of(*then_);
    if (!nothing_.empty()) json["then"]["nothing"] = nothing_;
    if (const std::optional<Timed> same = kept()) {
      json["now_then_step_s"] = same->replayed.step;
    }
    return json.dump(2) + "\n";
  }

  const TrainConfig& config_;
  LayoutSearch before_;
  std::optional<LayoutSearch> then_;  ///< none where the changed cluster cannot be searched
  std::string nothing_;               ///< why nothing is found then
};

}  // namespace

SearchAnswer what_if(const TrainConfig& config) { return Comparison(config).answer(); }

}  // namespace usp
