#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"

namespace CLI {
class App;
}

namespace usp {

/// The command line: every flag is bound to the field of the same name in a configuration struct
/// and knows its group in --help.
class Args {
 public:
  /// A flag that has been bound.
  class Flag {
   public:
    /// A resumed run may give it another value: what a step computes does not depend on it, or
    /// something else that is compared stands for it.
    void may_differ_on_resume() { may_differ_ = true; }
    /// A question: the program answers it, without data, and does not train. It is asked where
    /// `is_asked` says so; without that, where the flag has another value than now. A resumed run
    /// may differ in it.
    void is_question(std::function<bool()> is_asked = {});

   private:
    friend class Args;
    std::string name_;
    std::string group_;
    std::function<std::string()> to_json_;
    std::function<void(const std::string& json)> from_json_;
    std::function<bool()> is_asked_;  ///< of a question
    bool may_differ_ = false;
    bool taken_ = false;  ///< take() has given it another value than it had
    bool once_ = false;   ///< it has a value, and one alone
  };

  /// `description` heads --help.
  explicit Args(std::string description);
  ~Args();

  /// Flags bound from here on stand under this heading in --help.
  void group(std::string heading) { group_ = std::move(heading); }

  Flag& bind(const char* flag, int64_t& field, const char* help);
  Flag& bind(const char* flag, double& field, const char* help);
  Flag& bind(const char* flag, std::string& field, const char* help);
  Flag& bind(const char* flag, bool& field, const char* help);  ///< a switch without value
  /// A flag that may stand several times.
  Flag& bind(const char* flag, std::vector<std::string>& field, const char* help);
  /// A word out of `choices`.
  Flag& bind(const char* flag, std::string& field, std::vector<std::string> choices,
             const char* help);

  /// Whether the command line sets the flag.
  bool typed(const std::string& flag) const;
  /// The same, or whether take() has: nothing else may decide its value then.
  bool given(const char* flag) const;
  /// The questions that the command line asks, in its order.
  std::vector<std::string> questions() const;
  /// Gives a flag that was not typed the value that another run had, as JSON. It counts as given
  /// where that is not its default, or with `always`. Nothing happens where there is no such flag,
  /// or where the value is none that it could have.
  void take(const std::string& flag, const std::string& json, bool always);
  /// The heading of a flag in --help; empty where there is no such flag.
  std::string group_of(const std::string& flag) const;

  /// Fills the bound fields. Returns false after --help and --version, whose text it has printed:
  /// the program then ends with success. Throws UsageError for unknown flags, malformed values, and
  /// two values of one flag.
  bool parse(int argc, const char* const* argv);

  /// Every flag with its current value as a JSON object, for the run's record.
  std::string to_json() const;
  /// The flags that a resumed run may give another value.
  std::set<std::string> may_differ_on_resume() const;
  /// Asks `flags` for those that decide what this very run computes, though they are marked as free
  /// to differ: they depend on values that are read later.
  void decide_result(std::function<std::vector<std::string>()> flags) {
    decide_result_.push_back(std::move(flags));
  }
  /// All of these, by the values as they are now.
  std::vector<std::string> decisive() const;

 private:
  template <class Field>
  Flag& add(const char* flag, Field& field, bool once = true);
  Flag* find(const std::string& flag);
  /// Throws UsageError where a flag of one value stands among the words twice.
  void refuse_repeated(int argc, const char* const* argv) const;
  /// " did you mean --steps?", or nothing where no flag is similar.
  std::string suggestion(const std::string& unknown) const;

  std::unique_ptr<CLI::App> app_;
  std::string group_;
  std::deque<Flag> flags_;
  std::vector<std::function<std::vector<std::string>()>> decide_result_;
};

/// Throws UsageError, which names flag, value and rule, unless the value lies in [minimum,
/// maximum].
void check_range(const char* flag, double value, double minimum, double maximum);
/// The same unless value is at least 1.
void check_positive(const char* flag, int64_t value);

}  // namespace usp
