#include "planner/why.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>

#include "base/check.h"
#include "planner/layout_search.h"

namespace usp {

namespace {

constexpr std::array<const char*, 16> kOrder = {"forward matmul",
                                                "forward attention",
                                                "forward memory",
                                                "backward matmul",
                                                "backward attention",
                                                "backward memory",
                                                "between matmul",
                                                "between attention",
                                                "between memory",
                                                "launch",
                                                "tp",
                                                "cp",
                                                "ep",
                                                "dp",
                                                "bubble",
                                                "tail"};

/// Headings of flags that make another layout, and not another model or another question.
constexpr std::array<std::string_view, 9> kOfLayouts = {"Training",
                                                        "Execution",
                                                        "Data parallelism",
                                                        "Tensor and sequence parallelism",
                                                        "Context parallelism",
                                                        "Pipeline parallelism",
                                                        "Expert parallelism",
                                                        "Composition",
                                                        "Fusion"};

bool is_number(const std::string& side) {
  return std::ranges::all_of(side, [](char c) { return c >= '0' && c <= '9'; });
}

/// The base's layout with these flags instead of its own.
TrainConfig with_flags(const TrainConfig& base, const std::string& flags, int64_t ranks) {
  TrainConfig config = base;
  Args args("");
  config.bind(args);
  std::vector<std::string> words = {"why"};
  std::istringstream stream(flags);
  for (std::string word; stream >> word;) words.push_back(word);
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  const auto refuse_flag = [&](const std::string& word) {
    usage_error("why={}: {} is no flag of a layout; try --tp_size 2", base.search.why, word);
  };
  for (const std::string& word : words) {
    const std::string flag = word.starts_with("--") ? word.substr(2, word.find('=') - 2) : "";
    const std::string group = args.group_of(flag);
    const bool of_layout = group.empty() || std::ranges::count(kOfLayouts, group) > 0;
    if (!of_layout || flag.starts_with("help") || word == "-h" || flag == "version") {
      refuse_flag(word);
    }
  }
  args.parse(static_cast<int>(argv.size()), argv.data());
  if (!args.questions().empty()) refuse_flag("--" + args.questions().front());
  const auto validate = [&](const auto&... parts) { (parts.validate(args), ...); };
  validate(config.data_parallel, config.tensor_parallel, config.context_parallel, config.pipeline,
           config.expert_parallel);
  for (const auto& [flag, value] : {std::pair{"micro_batch_size", config.micro_batch_size},
                                    {"grad_acc_steps", config.grad_acc_steps},
                                    {"seq_len", config.seq_len}}) {
    check_positive(flag, value);
  }
  const int64_t copy = config.mesh().ranks_of_a_copy();
  if (!args.typed("dp_size")) config.data_parallel.dp_size = std::max<int64_t>(1, ranks / copy);
  config.communication->ranks = config.mesh().ranks();
  config.communication->node_size = std::min(ranks, base.communication->node_size);
  return config;
}

/// Two layouts beside each other.
class TwoLayouts {
 public:
  explicit TwoLayouts(const TrainConfig& config)
      : config_(config), search_(config, read_cluster(config.search.cluster)) {
    const std::vector<std::string> sides = sides_of_why(config.search.why);
    if (std::ranges::any_of(sides, is_number)) search_.run();
    for (const std::string& side : sides) {
      timed_.push_back(timed_of(side));
      names_.push_back(is_number(side) ? layout_flags(timed_.back().candidate.config) : side);
    }
  }

  std::string text() const {
    const Timed &a = timed_[0], &b = timed_[1];
    const double from = a.replayed.step, to = b.replayed.step;
    std::string text = search_.heading();
    text += fmt::format("A: {}\n   {}\nB: {}\n   {}\n\n", names_[0], about(a), names_[1], about(b));
    text += fmt::format("{:<22}{:>10}{:>10}{:>10}\n", "", "A, s", "B, s", "B - A");
    const std::vector<PartOfTwo> parts = parts_of_two(a, b);
    double low = std::min(from, to), high = std::max(from, to), sum = from;
    for (const PartOfTwo& part : parts) {
      sum += part.b - part.a;
      low = std::min(low, sum);
      high = std::max(high, sum);
    }
    sum = from;
    for (const PartOfTwo& part : parts) {
      const double after = sum + part.b - part.a;
      const std::string change = bar(sum, after, low, high);
      sum = after;
      if (std::max(part.a, part.b) < 0.0005) continue;  // all zeros
      text += fmt::format("   {:<19}{:>10.3f}{:>10.3f}{:>+10.3f}{}\n", part.name, part.a, part.b,
                          part.b - part.a, change);
    }
    return text +
           fmt::format("{:<22}{:>10.3f}{:>10.3f}{:>+10.3f}\n", "the step", from, to, to - from);
  }

  std::string json() const {
    nlohmann::ordered_json json;
    for (int i = 0; i < 2; ++i) {
      const Timed& timed = timed_[i];
      json[i == 0 ? "a" : "b"] = {{"flags", names_[i]},
                                  {"step_s", timed.replayed.step},
                                  {"rank", timed.replayed.classes[timed.replayed.last()].rank},
                                  {"gib", timed.gib()}};
    }
    for (const PartOfTwo& part : parts_of_two(timed_[0], timed_[1])) {
      json["parts"].push_back({{"part", part.name}, {"a_s", part.a}, {"b_s", part.b}});
    }
    return json.dump(2) + "\n";
  }

 private:
  Timed timed_of(const std::string& side) const {
    if (is_number(side)) {
      const auto count = std::ssize(search_.timed());
      const int64_t number = side.size() > 9 ? 0 : std::stoll(side);
      if (number < 1 || number > count) {
        usage_error(
            "why={}: the search lays out {} layouts in time, and {} is none of them; try {}",
            config_.search.why, count, side, count > 1 ? "\"1; 2\"" : "flags");
      }
      return search_.timed()[number - 1];
    }
    TrainConfig layout = with_flags(config_, side, search_.ranks());
    const int64_t ranks = layout.mesh().ranks(), samples = layout.global_batch_size();
    if (ranks != search_.ranks()) {
      usage_error("why={}: {} makes {} ranks, and the cluster has {}; try --dp_size {}",
                  config_.search.why, side, ranks, search_.ranks(),
                  std::max<int64_t>(1, search_.ranks() / layout.mesh().ranks_of_a_copy()));
    }
    if (samples * layout.seq_len != search_.config().planning.plan) {
      const int64_t each = layout.data_parallel.dp_size * layout.micro_batch_size * layout.seq_len;
      usage_error(
          "why={}: {} makes {} tokens a step, and the batch has {}; try --grad_acc_steps {}",
          config_.search.why, side, samples * layout.seq_len, search_.config().planning.plan,
          std::max<int64_t>(1, search_.config().planning.plan / each));
    }
    layout.each_part([&](const auto& part) { part.check(layout); });
    return time_step({layout, 0, 0, "", 0}, search_.cluster());
  }

  std::string about(const Timed& timed) const {
    return fmt::format(
        "rank {} ends last; {:.1f} GiB{}", timed.replayed.classes[timed.replayed.last()].rank,
        timed.gib(),
        timed.gib() > search_.cluster().memory_gib.value ? ", which does not fit" : "");
  }

  /// From one sum to the next.
  static std::string bar(double from, double to, double low, double high) {
    constexpr double kWidth = 40;
    const auto place = [&](double at) {
      return high == low ? 0 : static_cast<size_t>(std::lround(kWidth * (at - low) / (high - low)));
    };
    const size_t begin = place(std::min(from, to)), end = place(std::max(from, to));
    if (begin == end) return "";
    return std::string(begin + 2, ' ') + std::string(end - begin, to > from ? '+' : '-');
  }

  const TrainConfig& config_;
  LayoutSearch search_;
  std::vector<Timed> timed_;
  std::vector<std::string> names_;  ///< their flags
};

}  // namespace

// [parts_of_two]
std::vector<PartOfTwo> parts_of_two(const Timed& a, const Timed& b) {
  const auto parts = [](const Timed& timed) {
    return timed.replayed.classes[timed.replayed.last()].parts;
  };
  std::map<std::string, double> of_a = parts(a), of_b = parts(b);
  std::vector<PartOfTwo> all;
  for (const char* name : kOrder) {
    if (of_a[name] != 0 || of_b[name] != 0) all.push_back({name, of_a[name], of_b[name]});
    of_a.erase(name);
    of_b.erase(name);
  }
  for (const auto& [name, seconds] : of_a) all.push_back({name, seconds, of_b[name]});
  for (const auto& [name, seconds] : of_b) {
    if (!of_a.contains(name)) all.push_back({name, 0, seconds});
  }
  return all;
}
// [parts_of_two]

std::vector<std::string> sides_of_why(const std::string& text) {
  std::vector<std::string> sides;
  std::stringstream stream(text + ";");
  for (std::string side; std::getline(stream, side, ';');) {
    const size_t begin = side.find_first_not_of(' '), end = side.find_last_not_of(' ');
    sides.push_back(begin == std::string::npos ? "" : side.substr(begin, end - begin + 1));
  }
  const bool all = std::ranges::all_of(sides, [](const std::string& side) {
    return !side.empty() && (is_number(side) || side.starts_with("--"));
  });
  if (sides.size() != 2 || !all) {
    usage_error(
        "why={}: it compares two layouts, each a number of the list or flags; try \"1; 2\" or "
        "\"1; --tp_size 2\"",
        text);
  }
  return sides;
}

SearchAnswer why(const TrainConfig& config) {
  const TwoLayouts two(config);
  return {config.search.plan_json ? two.json() : two.text()};
}

}  // namespace usp
