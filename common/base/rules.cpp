#include "base/rules.h"

#include <fmt/ranges.h>

#include <sstream>

namespace usp {

namespace {

std::multiset<std::string>& lifted() {
  static std::multiset<std::string> rules;
  return rules;
}

/// "--num_heads " of "--num_heads 2"; "" of what is more than one flag with a value.
std::string flag_of(const std::string& remedy) {
  const size_t space = remedy.find(' ');
  if (!remedy.starts_with("--") || space == std::string::npos) return "";
  return remedy.find(" --") == std::string::npos ? remedy.substr(0, space + 1) : "";
}

/// "1, 2 or 4".
std::string list(const std::vector<std::string>& words) {
  if (words.size() < 2) return words.empty() ? "" : words[0];
  const auto last = words.end() - 1;
  return fmt::format("{} or {}", fmt::join(words.begin(), last, ", "), *last);
}

/// What to do, behind a text that names the flag already, or does not.
std::string advice(const std::string& text, const Remedies& remedies) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < remedies.size();) {
    const std::string flag = flag_of(remedies[i]);
    std::vector<std::string> values;
    for (; !flag.empty() && i < remedies.size() && remedies[i].starts_with(flag); ++i) {
      values.push_back(remedies[i].substr(flag.size()));
    }
    const std::string remedy = values.empty() ? remedies[i++] : flag + list(values);
    const std::string name = flag.empty() ? "" : flag.substr(2, flag.size() - 3);
    const bool left_out = remedy.starts_with("leave out --") && text.starts_with(remedy.substr(12));
    const bool named = parts.empty() && !name.empty() && text.starts_with(name + "=");
    const std::string way = left_out ? "leave it out" : named ? list(values) : remedy;
    parts.push_back(parts.empty() && remedy.starts_with("--") ? "try " + way : way);
  }
  return parts.empty() ? "" : fmt::format("; {}", fmt::join(parts, ", or "));
}

}  // namespace

std::string_view name(Otherwise otherwise) {
  return otherwise == Otherwise::wrong   ? "wrong"
         : otherwise == Otherwise::hangs ? "hangs"
                                         : "silent";
}

Remedies values_of(const std::string& flag, const std::vector<int64_t>& values) {
  Remedies remedies;
  for (int64_t value : values) remedies.push_back(fmt::format("--{} {}", flag, value));
  return remedies;
}

Remedies divisors_of(const std::string& flag, int64_t n, int64_t limit) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= n && d <= limit; ++d) {
    if (n % d == 0) divisors.push_back(d);
  }
  return values_of(flag, divisors);
}

Refusal::Refusal(Otherwise otherwise, std::string rule, std::string text, Remedies remedies)
    : UsageError(text + advice(text, remedies)),
      otherwise_(otherwise),
      rule_(std::move(rule)),
      text_(std::move(text)),
      remedies_(std::move(remedies)) {}

LiftedRule::LiftedRule(const std::string& rule) : place_(lifted().insert(rule)) {}
LiftedRule::~LiftedRule() { lifted().erase(place_); }
bool LiftedRule::is_lifted(const std::string& rule) { return lifted().contains(rule); }

std::string together(const std::string& first, const std::string& second) {
  // What follows the flags that are left out would be left out, too.
  const bool leaves_out = first.find("leave out ") != first.npos;
  if (leaves_out || !first.starts_with("--") || !second.starts_with("--")) {
    return fmt::format("{} and {}", first, second);
  }
  std::vector<std::string> words = {""};  // where a command line has its program
  std::istringstream of_first(first), of_second(second);
  for (std::string word; of_first >> word;) words.push_back(word);
  for (std::string word; of_second >> word;) {
    if (word.starts_with("--")) words = with_remedy(words, "leave out " + word);
  }
  words.push_back(second);
  return fmt::format("{}", fmt::join(words.begin() + 1, words.end(), " "));
}

std::vector<std::string> with_remedy(std::vector<std::string> words, const std::string& remedy) {
  std::istringstream stream(remedy);
  bool left_out = false;
  for (std::string word; stream >> word;) {
    if (word == "start" || word == "on") break;  // "on 2 ranks"
    if (word == "leave" || word == "and") left_out = word == "leave";
    if (word == "leave" || word == "out" || word == "and") continue;
    for (size_t i = 1; word.starts_with("--") && i < words.size();) {
      const bool alone = words[i] == word;
      if (!alone && !words[i].starts_with(word + "=")) {
        ++i;
        continue;
      }
      const bool has_value = alone && i + 1 < words.size() && !words[i + 1].starts_with("--");
      words.erase(words.begin() + i, words.begin() + i + (has_value ? 2 : 1));
    }
    if (!left_out) words.push_back(word);
  }
  return words;
}

int64_t ranks_to_start(const std::string& remedy) {
  for (const std::string_view before : {"start ", " on "}) {
    const size_t place = remedy.find(before);
    if (place != std::string::npos) return std::stoll(remedy.substr(place + before.size()));
  }
  return 0;
}

}  // namespace usp
