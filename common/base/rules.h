#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace usp {

/// Ways out of a refusal, as they would be typed: "--num_heads 2", "--num_heads 2 --num_layers 4",
/// "leave out --head_dim", "start 2 ranks", or "--num_heads 2 on 2 ranks".
using Remedies = std::vector<std::string>;

/// One remedy for each of these values of a flag.
Remedies values_of(const std::string& flag, const std::vector<int64_t>& values);
/// One for each divisor of n that lies in [1, limit].
Remedies divisors_of(const std::string& flag, int64_t n, int64_t limit = INT64_MAX);

/// What would come of a command line that breaks a rule if nothing refused it.
enum class Otherwise {
  wrong,   ///< another result than one process has, or an error in the run
  hangs,   ///< ranks would wait for each other forever
  silent,  ///< a right result, but nothing says that a flag has no effect, or a rank no work
};

std::string_view name(Otherwise otherwise);  ///< "wrong", "hangs" or "silent"

/// A command line that breaks a rule of what goes with what.
class Refusal : public UsageError {
 public:
  /// `rule` is the rule's short name; `text` gives it in words, with the values that break it.
  Refusal(Otherwise otherwise, std::string rule, std::string text, Remedies remedies);

  Otherwise otherwise() const { return otherwise_; }
  const std::string& rule() const { return rule_; }
  const Remedies& remedies() const { return remedies_; }
  /// The same with these remedies alone.
  Refusal with(Remedies remedies) const { return {otherwise_, rule_, text_, std::move(remedies)}; }

 private:
  Otherwise otherwise_;
  std::string rule_, text_;
  Remedies remedies_;
};

/// While it lives, the rule of this name refuses nothing, on any thread: for tests of what would
/// happen. Make it before the ranks begin.
class LiftedRule {
 public:
  explicit LiftedRule(const std::string& rule);
  ~LiftedRule();
  LiftedRule(const LiftedRule&) = delete;
  LiftedRule& operator=(const LiftedRule&) = delete;

  /// Whether one of them lives that names this rule.
  static bool is_lifted(const std::string& rule);

 private:
  std::multiset<std::string>::iterator place_;
};

/// Throws Refusal with a formatted text, unless the rule is lifted.
template <class... Args>
void refuse(Otherwise otherwise, const char* rule, Remedies remedies,
            fmt::format_string<Args...> text, Args&&... args) {
  if (LiftedRule::is_lifted(rule)) return;
  throw Refusal(otherwise, rule, fmt::format(text, std::forward<Args>(args)...),
                std::move(remedies));
}

/// Refuses with Otherwise::wrong.
template <class... Args>
void refuse(const char* rule, Remedies remedies, fmt::format_string<Args...> text, Args&&... args) {
  refuse(Otherwise::wrong, rule, std::move(remedies), text, std::forward<Args>(args)...);
}
/// Refuses with Otherwise::hangs.
template <class... Args>
void refuse_hang(const char* rule, Remedies remedies, fmt::format_string<Args...> text,
                 Args&&... args) {
  refuse(Otherwise::hangs, rule, std::move(remedies), text, std::forward<Args>(args)...);
}
/// Refuses with Otherwise::silent.
template <class... Args>
void refuse_silent(const char* rule, Remedies remedies, fmt::format_string<Args...> text,
                   Args&&... args) {
  refuse(Otherwise::silent, rule, std::move(remedies), text, std::forward<Args>(args)...);
}

/// One remedy of two. A flag that both set has the second's value.
std::string together(const std::string& first, const std::string& second);
/// The words of a command line as the remedy would have them: without the flags that it names, and
/// then with those that it sets. The ranks are for whoever starts them.
std::vector<std::string> with_remedy(std::vector<std::string> words, const std::string& remedy);
/// The ranks of "start 2 ranks" or "--num_heads 2 on 2 ranks"; otherwise 0.
int64_t ranks_to_start(const std::string& remedy);

}  // namespace usp
