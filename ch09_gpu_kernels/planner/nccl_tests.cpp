#include "planner/nccl_tests.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <fstream>
#include <numeric>
#include <optional>
#include <sstream>

#include "base/check.h"
#include "base/json_reader.h"

namespace usp {

namespace {

constexpr std::string_view kRemedy = "try the output of all_reduce_perf -b 8 -e 1G -f 2 -g 8";

/// What a program of nccl-tests measures; the first name that is part of `text`.
std::optional<CommKind> kind_in(const std::string& text) {
  using Named = std::pair<std::string_view, CommKind>;
  constexpr std::array<Named, 5> kNamed = {Named{"all_reduce", CommKind::all_reduce},
                                           {"reduce_scatter", CommKind::reduce_scatter},
                                           {"all_gather", CommKind::all_gather},
                                           {"alltoall", CommKind::all_to_all},
                                           {"broadcast", CommKind::broadcast}};
  for (const auto& [part, kind] : kNamed) {
    if (text.find(part) != std::string::npos) return kind;
  }
  return std::nullopt;
}

/// Reads such an output line by line.
class OutputReader {
 public:
  explicit OutputReader(const std::string& file) : file_(file) {
    std::ifstream stream(file);
    if (!stream) usage_error("plan_runs={}: there is no such file; {}", file, kRemedy);
    for (std::string line; std::getline(stream, line);) take(line);
    if (hosts_.size() < 2 || rows_.empty()) {
      usage_error(
          "plan_runs={} names {} ranks and {} sizes, and a link needs 2 ranks and a size; {}", file,
          hosts_.size(), rows_.size(), kRemedy);
    }
    if (!kind_) kind_ = kind_in(file.substr(file.find_last_of('/') + 1));
    if (!kind_) {
      usage_error(
          "plan_runs={} does not say which collective it measured; rename it after the program, "
          "such as all_reduce.txt",
          file);
    }
  }

  RunTimes times() const {
    RunTimes times;
    times.on_device = times.is_table = true;
    times.ranks_per_node = ranks_per_node();
    std::vector<int> members(hosts_.size());
    std::iota(members.begin(), members.end(), 0);
    const auto all = std::make_shared<const std::vector<int>>(std::move(members));
    for (const auto& [bytes, seconds] : rows_) {
      times.sent.push_back({{.kind = *kind_, .payload_bytes = bytes},
                            {.name = "", .members = all},
                            seconds,
                            2 * iterations_});
    }
    return times;
  }

 private:
  template <class... Values>
  [[noreturn]] void refuse(fmt::format_string<Values...> text, Values&&... values) const {
    usage_error("plan_runs={}, line {}: {}", file_, line_,
                fmt::format(text, std::forward<Values>(values)...));
  }

  void take(std::string line) {
    ++line_;
    // mpirun --tag-output writes "[1,0]<stdout>:" before it.
    if (const size_t tag = line.find("<stdout>:"); tag != std::string::npos) line.erase(0, tag + 9);
    std::istringstream stream(line);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (words.empty()) return;
    if (words[0] == "#") return take_comment(line, words);
    if (words[0].find_first_not_of("0123456789") == std::string::npos) take_row(words);
  }

  // [comment]
  void take_comment(const std::string& line, const std::vector<std::string>& words) {
    if (line.find("Collective test starting:") != std::string::npos) {
      kind_ = kind_in(line);
      if (!kind_) refuse("{} is no collective that a trainer uses; {}", words.back(), kRemedy);
    }
    for (size_t i = 1; i + 1 < words.size(); ++i) {
      const bool timed = words[i] == "iters:" && words[i - 1] != "warmup" && words[i - 1] != "agg";
      if (timed) iterations_ = whole(words[i + 1]);
    }
    const auto on = std::ranges::find(words, "on");
    if (words.size() < 3 || words[1] != "Rank" || on == words.end() || on + 1 == words.end())
      return;
    if (whole(words[2]) != std::ssize(hosts_)) refuse("rank {} is expected here", hosts_.size());
    const auto group = std::ranges::find(words, "Group");
    if (group < on && *(group + 1) != "0") {
      refuse(
          "rank {} is in group {}, and groups beside one another disturb each other; measure "
          "one group",
          words[2], *(group + 1));
    }
    hosts_.push_back(*(on + 1));
  }
  // [comment]

  // [row]
  /// Size, count, type, operation and root; then, out of place and in place, time, two rates and
  /// how many values were wrong.
  void take_row(const std::vector<std::string>& words) {
    constexpr size_t kColumns = 13, kTimes[] = {5, 9};
    if (words.size() != kColumns) {
      refuse("{} columns in place of {}: cut off, or of an older nccl-tests; {}", words.size(),
             kColumns, kRemedy);
    }
    const int64_t bytes = whole(words[0]);
    double least = INFINITY;
    for (const size_t at : kTimes) {
      if (words[at] == "N/A") continue;
      const std::string& wrong = words[at + 3];
      if (wrong != "0" && wrong != "N/A") refuse("{} values are wrong; mend the link first", wrong);
      least = std::min(least, number(words[at]) * 1e-6);
    }
    if (bytes > 0 && least > 0 && std::isfinite(least)) rows_.emplace_back(bytes, least);
  }
  // [row]

  double number(const std::string& word) const {
    double value = 0;
    const char* const end = word.data() + word.size();
    const auto [to, error] = std::from_chars(word.data(), end, value);
    if (error != std::errc() || to != end || !(value >= 0)) {
      refuse("{} is no time in microseconds; {}", in_quotes(word), kRemedy);
    }
    return value;
  }

  int64_t whole(const std::string& word) const {
    int64_t value = 0;
    const char* const end = word.data() + word.size();
    const auto [to, error] = std::from_chars(word.data(), end, value);
    if (error != std::errc() || to != end || value < 0) {
      refuse("{} is no whole number; {}", in_quotes(word), kRemedy);
    }
    return value;
  }

  // [nodes]
  /// Ranks with the same host, which have to follow one another, as many on each.
  int64_t ranks_per_node() const {
    const auto other = std::ranges::find_if(
        hosts_, [&](const std::string& host) { return host != hosts_.front(); });
    const int64_t ranks = other - hosts_.begin();
    for (int64_t i = 0; i < std::ssize(hosts_); ++i) {
      const bool begins = i % ranks == 0;
      const bool is_new =
          std::find(hosts_.begin(), hosts_.begin() + i, hosts_[i]) == hosts_.begin() + i;
      if (begins == is_new) continue;
      usage_error(
          "plan_runs={}: rank {} is on {}, and nodes must have {} ranks each that follow one "
          "another, as rank 0's; start them with mpirun --map-by slot",
          file_, i, hosts_[i], ranks);
    }
    return ranks;
  }
  // [nodes]

  std::string file_;
  int64_t line_ = 0;
  int64_t iterations_ = 1;
  std::optional<CommKind> kind_;
  std::vector<std::string> hosts_;  ///< of each rank
  std::vector<std::pair<int64_t, double>> rows_;
};

}  // namespace

RunTimes read_nccl_tests(const std::string& file) { return OutputReader(file).times(); }

}  // namespace usp
