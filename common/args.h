#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"

namespace CLI {
class App;
}

namespace usp {

/// The command line: every flag is bound to the field of the same name in a configuration struct
/// and knows its group in --help.
class Args {
 public:
  /// `description` heads --help.
  explicit Args(std::string description);
  ~Args();

  /// Flags bound from here on stand under this heading in --help.
  void group(std::string heading) { group_ = std::move(heading); }

  void bind(const char* flag, int64_t& field, const char* help);
  void bind(const char* flag, double& field, const char* help);
  void bind(const char* flag, std::string& field, const char* help);
  void bind(const char* flag, bool& field, const char* help);  ///< a switch without value
  /// A flag that may stand several times.
  void bind(const char* flag, std::vector<std::string>& field, const char* help);
  /// A word out of `choices`.
  void bind(const char* flag, std::string& field, std::vector<std::string> choices,
            const char* help);

  /// Whether the command line sets the flag.
  bool given(const char* flag) const;

  /// Fills the bound fields. Returns false where the run ends here with success (--help, --version:
  /// the text was printed). Throws UsageError for unknown flags and malformed values.
  bool parse(int argc, const char* const* argv);

  /// Every flag with its current value as a JSON object, for the run's record.
  std::string to_json() const;

 private:
  struct Flag {
    std::string name;
    std::function<std::string()> to_json;
  };

  std::unique_ptr<CLI::App> app_;
  std::string group_;
  std::vector<Flag> flags_;
};

/// Throws UsageError naming flag, value and rule unless value lies in [minimum, maximum].
void check_range(const char* flag, double value, double minimum, double maximum);

}  // namespace usp
